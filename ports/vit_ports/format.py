"""A recording on disk: pictures, and what an image tower makes of them, stage by stage.

``ports/README.md`` is the description of the format.

Tests: ports/tests/cli/test_compare.py.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Stages = dict[str, Array]  # of one picture, by stage: grid (2,), tokens (h * w, C), pooled (D,)

VERSION = 2
PRECISIONS = ("float32", "float16", "tf32", "bfloat16", "int8")  # from the finest to the coarsest
TABLE = "table"
OWN_PIXELS = "own_pixels"  # among limits: what pixels of another resizer move

SAMPLE = 6  # tokens that are kept of what a mistake gives
LARGEST = 3e38  # number of a stage: float32's
# By what each stage is measured (see ``rule.Stage.differences``), and the widest limit that a recording may have:
# of pixels in grey levels, else all of a number, token or channel. ``OF_TOKENS`` for stages that are not here.
MEASURES = {
    "grid": {"number": 0.5},
    "pixels": {"pixel": 3.0, "mean": 1.0},
    "pooled": {"number": 1.0},
}
OF_TOKENS = {"token": 1.0, "channel": 1.0}
# In float32, after the pixels. The kit's have 1e-4 at most; float16 moves its stages by 7e-4 or more.
WIDEST_IN_FLOAT32 = 5e-4
UNPACKED = 2**30  # bytes of an archive; recordings and what ``identify`` reads have a tenth of it

NUMBER_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
}


class Unusable(ValueError):
    """A folder that cannot be compared; the text says why and what is valid."""


@dataclass(frozen=True)
class Recording:
    """Pictures and their stages.

    Attributes:
        about: what recording.json says.
        stages: of each picture, in order.
        table: the position table (H0, W0, C).
        mistakes: what known mistakes give instead: {"NAME/000.STAGE": numbers}, of a stage with
            tokens a sample.
    """

    about: Mapping[str, Any]
    stages: Sequence[Stages]
    table: Any
    mistakes: Mapping[str, Array]

    @cached_property
    def order(self) -> list[str]:
        """The names of the stages, in the order in which data flows."""
        return list(self.stages[0])

    @cached_property
    def limits(self) -> dict[str, Any]:
        """Of each stage what counts as rounding: by precision, then by measure."""
        return {stage["name"]: stage["limits"] for stage in self.about["stages"]}


def sampled(numbers: Array) -> Array:
    """A few rows of an array, from the first to the last, as mistakes.safetensors holds them."""
    if numbers.ndim < 2 or len(numbers) <= SAMPLE:
        return numbers
    # Closer at first: at equal distances they would be the diagonal of a grid of 6 x 6.
    shares = np.linspace(0, 1, SAMPLE) ** 1.5
    rows = (len(numbers) - 1) * shares
    return numbers[rows.round().astype(int)]


# Arrays ----------------------------------------------------------------------------------------


def read_arrays(file: Path) -> dict[str, Array]:
    """The arrays of a file by name, bfloat16 as float32; a .npy file's has the file's name.

    Raises:
        Unusable: there is no such file; it is cut off, has too many bytes, or holds something else.
    """
    check_is_file(file)
    try:
        reader = READERS[file.suffix.lower()]
        return reader(file)
    except Exception as problem:  # each reader has errors of its own for a damaged file
        raise Unusable(
            f"{file} is no whole file of arrays ({problem!r}); valid: {', '.join(READERS)}"
        ) from problem


def check_is_file(file: Path) -> None:
    """Raise ``Unusable`` unless it is there, and is no pipe."""
    if not file.is_file():
        raise Unusable(f"there is no file {file}")


def _read_safetensors(file: Path) -> dict[str, Array]:
    from safetensors import deserialize

    arrays = {}
    for name, entry in deserialize(file.read_bytes()):
        array = np.frombuffer(entry["data"], NUMBER_TYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            # The upper half of a float32.
            array = (array.astype("<u4") << 16).view("<f4")
        arrays[name] = array.reshape(entry["shape"])
    return arrays


def _read_npy(file: Path) -> dict[str, Array]:
    with file.open("rb") as opened:
        array = np.lib.format.read_array(opened)
        if opened.read(1):
            raise ValueError("bytes follow the array")
    return {file.stem: array}


def _read_npz(file: Path) -> dict[str, Array]:
    with np.load(file) as archive:
        size = sum(entry.file_size for entry in archive.zip.infolist())
        if size > UNPACKED:
            raise ValueError(f"unpacked it has more than {UNPACKED:,} bytes")
        return dict(archive)


READERS = {".safetensors": _read_safetensors, ".npz": _read_npz, ".npy": _read_npy}


# The reference ---------------------------------------------------------------------------------


def read_recording(folder: Path) -> Recording:
    """Read a reference: a whole recording.

    Raises:
        Unusable: something is missing, of another kind, or of another version.
    """
    about = read_about(folder)
    found = read_arrays(folder / "stages.safetensors")
    table = found.pop(TABLE, np.zeros(0))
    order = [stage["name"] for stage in about["stages"]]
    stages = read_stages(found, order, [{} for _ in about["pictures"]], folder)
    for own, picture in zip(stages, about["pictures"]):
        if list(own) != order or own["grid"].tolist() != picture["grid"]:
            raise Unusable(
                f"{folder} must hold every stage of every picture, with the grids of recording.json"
            )
    channels = stages[0][order[2]].shape[1:]  # that stage's tokens are (N, C)
    wanted = (*about["table_size"], *channels)
    if table.shape != wanted:
        raise Unusable(f"{folder} must hold a table in shape {wanted}; got {table.shape}")
    # A recording may come without what known mistakes give.
    mistakes = folder / "mistakes.safetensors"
    known = read_arrays(mistakes) if mistakes.exists() else {}
    for name, numbers in [(TABLE, table), *known.items()]:
        check_is_finite(numbers, f"{folder}: {name}")
    return Recording(about, stages, table, known)


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's recording.json says.

    Raises:
        Unusable: it is not there, is not whole, or of another version.
    """
    file = folder / "recording.json"
    check_is_file(file)
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        check(about, FORM)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as problem:
        raise Unusable(f"{file} does not describe a recording ({problem!r})") from problem
    return about


def check(value: Any, form: Any) -> None:
    """Raise an error unless a value of JSON has a form.

    A form is a dict, whose keys must be there; or a list with the form of every entry; or a function
    that raises an error if the value is wrong.
    """
    if isinstance(form, dict):
        for key, inner in form.items():
            check(value[key], inner)
    elif isinstance(form, list):
        entries = value.values() if isinstance(value, dict) else value
        for entry in entries:
            check(entry, form[0])
    else:
        form(value)


def positive(number: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it is a number above 0."""
    if not 0 < number < LARGEST:
        raise ValueError(f"{number} is no number above 0")


def readable(version: Any) -> None:
    """Raise ``ValueError`` unless it is the version of the format that this release reads."""
    if version != VERSION:
        raise ValueError(
            f"it is of version {version!r}, and this release reads {VERSION}: record it anew, or "
            "install the release that wrote it"
        )


def printable(words: Any) -> None:
    """Raise an error unless it is text that a terminal may show: others wrote it."""
    if not os.fspath(words).isprintable():
        raise ValueError(f"{words!r} holds characters that cannot be printed")


def inside(file: Any) -> None:
    """Raise an error unless it is the name of a file in the recording's folder."""
    parts = Path(file).parts
    if Path(file).is_absolute() or ".." in parts:
        raise ValueError(f"{file!r} is outside of the recording")


def limited(stages: Any) -> None:
    """Raise an error unless these stages begin with the grid, and have limits of rounding."""
    first = stages[0]
    if first["name"] != "grid":
        raise ValueError("the first stage is not the grid")
    precisions = first["limits"].keys() - {OWN_PIXELS}
    for stage in stages:
        name = stage["name"]
        printable(name)
        if stage["limits"].keys() - {OWN_PIXELS} != precisions:
            raise ValueError(f"{name} has limits of other precisions than the grid")
        for precision, limits in stage["limits"].items():
            for measure, widest in MEASURES.get(name, OF_TOKENS).items():
                limit = limits.get(measure, 0)
                if precision == "float32" and name not in ("grid", "pixels"):
                    widest = WIDEST_IN_FLOAT32
                if not 0 < limit <= widest:
                    raise ValueError(
                        f"{limit} by {measure} at {name} is no limit of {precision}'s rounding; valid: "
                        f"above 0, {widest} at most"
                    )


# Each of these refuses what is of another kind: no text, no whole number (``range``), no list (``set``).
text = os.fspath
FORM = {
    "version": readable,
    "patch_size": positive,
    "table_size": [positive],
    "max_patches": positive,
    "heads": positive,
    "mean": [float],
    "std": [positive],
    "filter": text,
    "pictures": [{"file": inside, "name": text, "size": [positive], "grid": [positive]}],
    "stages": limited,
    "mistakes_tried": range,
    "mistakes": [{"name": printable, "words": printable, "stage": printable, "pictures": set}],
}
"""Of recording.json, what ``compare`` and ports read."""


# Stages of a reference and of a port -----------------------------------------------------------


def read_stages(
    found: Mapping[str, Array], order: Sequence[str], likes: Sequence[Stages], folder: Path
) -> list[Stages]:
    """Arrays under their names, as the stages of each picture, in float64 and without padding.

    ``000.block_3`` is that of one picture, ``block_3`` a padded batch of all.

    Args:
        found: arrays by name.
        order: the stages.
        likes: for each picture the stages of the reference; none where this is the reference.
        folder: is named in errors.

    Raises:
        Unusable: a name that no stage and no picture has, a batch beside an array of one picture, or
            a stage of another shape, or with numbers that are not finite.
    """
    left = dict(found)
    for stage in left.keys() & order:
        batch = np.atleast_1d(left.pop(stage))
        for number, one in enumerate(batch):
            name = f"{number:03}.{stage}"
            if name in left:
                raise Unusable(f"{folder}: {stage} must be one batch, or an array for each picture")
            left[name] = one
    pictures = []
    for number, like in enumerate(likes):
        own: Stages = {}
        for stage in order:
            name = f"{number:03}.{stage}"
            if name in left:
                known = {**like, **own}  # so the grid, which comes first, is the picture's own
                own[stage] = read_stage(stage, left.pop(name), known, f"{folder}: {name}")
        pictures.append(own)
    if left:
        raise Unusable(
            f"{folder}: there is no {min(left)!r}; valid: 000 to {len(likes) - 1:03}, and after a dot "
            f"{', '.join(order)}"
        )
    return pictures


def read_stage(stage: str, given: Array, known: Stages, what: str) -> Array:
    """A picture's numbers at a stage, in float64 and without padding.

    Args:
        stage: its name.
        given: the numbers as they were written.
        known: the picture's grid, and the stage of the reference where it is another's.
        what: is named in errors.

    Raises:
        Unusable: they have another shape, or are not finite.
    """
    numbers = np.atleast_1d(given)
    like = known.get(stage, numbers)
    # Some keep the axis of the batch, or that of the one query.
    while numbers.ndim > like.ndim and len(numbers) == 1:
        numbers = numbers[0]
    shape = like.shape[-1:]
    if stage not in ("grid", "pooled"):
        tokens = math.prod(map(int, known["grid"]))
        shape = (tokens, *shape)
        numbers = numbers[:tokens]
    is_number = numbers.dtype.kind in "fiu"
    if not is_number or numbers.shape != shape:
        raise Unusable(
            f"{what} must hold numbers in shape {shape}; got {numbers.dtype} in shape {numbers.shape}"
        )
    check_is_finite(numbers, what)
    return numbers.astype(np.float64)


def check_is_finite(numbers: Array, what: str) -> None:
    """Raise ``Unusable`` unless all of them are numbers of float32."""
    if not np.all(np.abs(numbers) < LARGEST):
        raise Unusable(f"{what} must hold finite numbers; got NaN, or numbers beyond float32")


def read_port(folder: Path, reference: Recording) -> list[Stages]:
    """Read what a port wrote: of each picture the stages that are there, in float64, not padded.

    Raises:
        Unusable: no stage is there, or one has another name, shape, or numbers that are not finite;
            or it holds files of both kinds.
    """
    if not folder.is_dir():
        raise Unusable(f"there is no folder {folder}")
    files = [*folder.glob("stages.safetensors"), *folder.glob("*.npy")]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1:
        problem = "and not both: one may be of an older run" if kinds else "and holds neither"
        raise Unusable(
            f"{folder} must hold stages.safetensors, or an .npy file for each array (000.block_0.npy), "
            f"{problem}"
        )
    found: dict[str, Array] = {}
    for file in files:
        found |= read_arrays(file)
    # Its own table is not looked at: what it makes of it is.
    found.pop(TABLE, None)
    stages = read_stages(found, reference.order, reference.stages, folder)
    if not any(stages):
        raise Unusable(f"{folder} holds no stage")
    return stages


# Writing ---------------------------------------------------------------------------------------


def write_recording(recording: Recording, pictures: Sequence[Any], folder: Path) -> None:
    """Write a recording: the whole folder, or nothing.

    Args:
        recording: what is written.
        pictures: PIL images in RGB, in order.
        folder: takes the place of what is there.

    Raises:
        OSError: the disk is full, say.
    """
    from safetensors.numpy import save

    folder = folder.resolve()
    arrays = {TABLE: recording.table}
    for number, stages in enumerate(recording.stages):
        for stage, numbers in stages.items():
            arrays[f"{number:03}.{stage}"] = numbers
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".vit-ports-") as made:
        part = Path(made, folder.name)
        (part / "pictures").mkdir(parents=True)
        for picture, described in zip(pictures, recording.about["pictures"]):
            picture.save(part / described["file"])
        about = json.dumps(recording.about, indent=1, ensure_ascii=False)
        (part / "recording.json").write_text(about + "\n", encoding="utf-8")
        # safetensors' own ``save_file`` lets nobody else read the file.
        (part / "stages.safetensors").write_bytes(save(arrays))
        (part / "mistakes.safetensors").write_bytes(save(dict(recording.mistakes)))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
