"""A recording on disk: pictures, and what an image tower makes of them, stage by stage.

``docs/recordings.md`` is the description of the format. To read one, NumPy and safetensors are
enough.

Tests: tests/commands/cli/test_compare.py.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...names import did_you_mean

Array = np.ndarray[Any, Any]
Stages = dict[str, Array]  # of one picture, by stage: grid (2,), tokens (h * w, C), pooled (D,)
Limits = Mapping[str, Mapping[str, float]]  # of one stage: by precision, then by measure

FORMAT = "naflex-recording"
VERSION = 2
TABLE = "table"
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
OWN_PIXELS = "own_pixels"  # among limits: what pixels of another resizer move

EMBEDDINGS = {"token": 2e-5, "channel": 2e-5}
LATER = {"token": 3e-5, "channel": 1e-4}
FLOAT32 = {
    "grid": {"number": 0.5},
    # In grey levels. Right resizers round to whole ones after either of their two passes, which
    # moves a pixel by less than 1.5 levels, and a picture's mean by 0.05.
    "pixels": {"pixel": 2.01, "mean": 0.2},
    "patch_embedding": EMBEDDINGS,
    "position_embedding": EMBEDDINGS,
    "pooled": {"number": 2e-5},
}
"""What float32 may move a stage by, in each of its measures; ``LATER`` for those that are not here."""
SAMPLE = 6  # tokens that are kept of what a mistake gives
LARGEST = 3e38  # number of a stage: float32's
HALF_PRECISION = 2**-8
"""What bfloat16 may move a number of the table by, as a share of the largest."""

NUMBER_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BF16": "<u2"}
LAYOUTS = {
    "grid": ("rows and columns of patches", ["2"]),
    "pixels": ("row by row; in a patch (y, x, channel); from -1 to 1", ["h * w", "p * p * 3"]),
    "patch_embedding": ("pixels times the patch kernel, plus its bias", ["h * w", "C"]),
    "position_embedding": ("the same plus the table, resized to (h, w)", ["h * w", "C"]),
    "norm": ("the last LayerNorm", ["h * w", "C"]),
    "pooled": ("the attention pooling head", ["D"]),
}


class Unusable(ValueError):
    """A folder that cannot be compared; the text says why and what is valid."""


@dataclass(frozen=True)
class Recording:
    """Pictures and their stages.

    Attributes:
        about: what recording.json says.
        stages: of each picture, in order.
        table: the position table (H0, W0, C); None where it is not there.
        mistakes: what known mistakes give instead: {"NAME/000.STAGE": numbers}, of a stage with
            tokens a sample.
    """

    about: Mapping[str, Any]
    stages: Sequence[Stages]
    table: Array | None
    mistakes: Mapping[str, Array]

    @cached_property
    def order(self) -> list[str]:
        """The names of the stages, in the order in which data flows."""
        return [stage["name"] for stage in self.about["stages"]]

    @cached_property
    def limits(self) -> dict[str, Limits]:
        """Of each stage, what counts as rounding."""
        return {stage["name"]: stage["limits"] for stage in self.about["stages"]}


def float32_limits(stage: str) -> dict[str, float]:
    """What float32 may move a stage by, in each of its measures (see ``rule.Stage.differences``)."""
    return dict(FLOAT32.get(stage, LATER))


def stage_entry(name: str, limits: Limits) -> dict[str, Any]:
    """What recording.json says of a stage."""
    layout, shape = LAYOUTS.get(name, (f"the output of {name}", ["h * w", "C"]))
    return {"name": name, "layout": layout, "shape": shape, "limits": dict(limits)}


def sha256(file: Path) -> str:
    """The hash of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sampled(numbers: Array) -> Array:
    """A few rows of an array, from the first to the last, as mistakes.safetensors holds them."""
    if numbers.ndim < 2 or len(numbers) <= SAMPLE:
        return numbers
    # Closer at first: at equal distances they would be the diagonal of a grid of 6 x 6.
    rows = (len(numbers) - 1) * np.linspace(0, 1, SAMPLE) ** 1.5
    return numbers[rows.round().astype(int)]


# Arrays ----------------------------------------------------------------------------------------


def read_safetensors(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, bfloat16 as float32.

    Raises:
        Unusable: the file is cut off, has too many bytes, or holds something else.
    """
    from safetensors import SafetensorError, deserialize

    arrays = {}
    try:
        for name, entry in deserialize(_needed(file).read_bytes()):
            array = np.frombuffer(entry["data"], NUMBER_TYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                # The upper half of a float32.
                array = (array.astype("<u4") << 16).view("<f4")
            arrays[name] = array.reshape(entry["shape"])
    except KeyError as problem:
        valid = ", ".join(NUMBER_TYPES)
        raise Unusable(f"{file} holds numbers of type {problem}; valid: {valid}") from problem
    except (SafetensorError, ValueError) as problem:
        raise Unusable(
            f"{file} is no whole safetensors file ({problem}); write it again"
        ) from problem
    return arrays


def read_npy(file: Path) -> Array:
    """The array of a .npy file.

    Raises:
        Unusable: the file is cut off, has too many bytes, or holds something else.
    """
    try:
        # Mapped, not read: so a header cannot ask for more memory than the file has.
        array = np.load(_needed(file), mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError("it is an archive")
        if array.offset + array.nbytes != file.stat().st_size:
            raise ValueError("bytes follow the array")
    except (ValueError, OSError, EOFError, OverflowError) as problem:
        raise Unusable(f"{file} is no whole .npy file ({problem})") from problem
    return array


def _needed(file: Path) -> Path:
    """The file, which must be there, and no pipe."""
    if file.is_file():
        return file
    raise Unusable(f"{file.parent} holds no file {file.name}")


# The reference ---------------------------------------------------------------------------------


def read_recording(folder: Path) -> Recording:
    """Read a reference: a whole recording.

    Raises:
        Unusable: something is missing, of another kind, or of another version.
    """
    about = read_about(folder)
    file = folder / "stages.safetensors"
    found = read_safetensors(file)
    table = found.pop(TABLE, None)
    if table is not None:
        check_array(table, (*about["table_size"], *table.shape[-1:]), f"{file}: {TABLE}")
    order = [stage["name"] for stage in about["stages"]]
    stages = split_pictures(found, order, len(about["pictures"]), folder)
    for number, (own, picture) in enumerate(zip(stages, about["pictures"])):
        for stage in order:
            if stage not in own:
                raise Unusable(f"{file} holds no {number:03}.{stage}")
            # As many channels as in the first picture.
            shape = shape_of(stage, picture["grid"], stages[0][stage])
            check_array(own[stage], shape, f"{file}: {number:03}.{stage}")
        if own["grid"].tolist() != picture["grid"]:
            raise Unusable(f"{file}: {number:03}.grid is not the one of recording.json")
    mistakes: dict[str, Array] = {}
    if (folder / "mistakes.safetensors").exists():
        mistakes = read_safetensors(folder / "mistakes.safetensors")
    return Recording(about, stages, table, mistakes)


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's recording.json says.

    Raises:
        Unusable: it is not there, is not whole, or of another version.
    """
    file = _needed(folder / "recording.json")
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if about["version"] == VERSION:
            _check_about(about)
    except (LookupError, TypeError, ValueError, RecursionError) as problem:
        raise Unusable(f"{file} does not describe a recording ({problem!r})") from problem
    if about["version"] != VERSION:
        raise Unusable(
            f"{file} is of version {about['version']!r}; this release reads {VERSION}: record it "
            "anew, or install the release that wrote it"
        )
    return about


def _check_about(about: Mapping[str, Any]) -> None:
    """Raise ``LookupError``, ``TypeError`` or ``ValueError`` unless all is there that is read."""
    red, green, blue = about["std"]
    height, width = about["table_size"]
    positive = [red, green, blue, height, width, about["mistakes_tried"] + 1]
    positive += [about["patch_size"], about["max_patches"], about["heads"]]
    for picture in about["pictures"]:
        height, width = picture["size"]
        positive += [height, width, *picture["grid"]]
        Path(picture["file"], picture["name"])
    names = [stage["name"] for stage in about["stages"]]
    if names[:1] != ["grid"] or len(set(names)) < len(names) or not about["pictures"]:
        raise ValueError("it must have pictures, and stages of different names, grid first")
    for stage in about["stages"]:
        for precision in {*PRECISIONS, *stage["limits"]}:
            for measure in float32_limits(stage["name"]):
                positive.append(stage["limits"][precision][measure])
    for number in positive:
        if not 0 < number < LARGEST:
            raise ValueError(f"{number} is no number above 0")
    for mistake in about["mistakes"]:
        Path(mistake["name"], mistake["words"])
        names.index(mistake["stage"])
        if not set(mistake["pictures"]) <= set(range(len(about["pictures"]))):
            raise ValueError(f"there is no such picture of mistake {mistake['name']!r}")


def split_pictures(
    found: Mapping[str, Array], order: Sequence[str], count: int, folder: Path
) -> list[Stages]:
    """Arrays under their names, as the stages of each of ``count`` pictures.

    ``000.block_3`` is that of one picture, ``block_3`` a padded batch of all.

    Raises:
        Unusable: a name that no stage and no picture has, a stage that is there twice, or a batch
            of another length.
    """
    stages: list[Stages] = [{} for _ in range(count)]
    places = {f"{number:03}.{stage}": number for number in range(count) for stage in order}
    for name, numbers in found.items():
        _, _, stage = name.rpartition(".")
        if name in places:
            written = {places[name]: numbers}
        elif name in order:
            written = dict(enumerate(np.atleast_1d(numbers)))
            if len(written) != count:
                raise Unusable(
                    f"{folder}: {name}: a batch has {count} pictures; got {len(written)}"
                )
        else:
            hint = did_you_mean(name, [*places, *order])
            raise Unusable(
                f"{folder}: there is no {name!r}{hint}; valid: 000 to {count - 1:03}, and after a dot "
                f"{', '.join(order)}"
            )
        for number, one in written.items():
            if stage in stages[number]:
                raise Unusable(f"{folder} holds {number:03}.{stage} twice, once in {name}")
            stages[number][stage] = one
    # A file has an order of its own.
    return [{stage: own[stage] for stage in order if stage in own} for own in stages]


def shape_of(stage: str, grid: Iterable[int], like: Array) -> tuple[int, ...]:
    """The shape of a stage of a picture that has this grid; ``like``: the stage of another one."""
    channels = like.shape[-1:]
    if stage in ("grid", "pooled"):
        return channels
    return (math.prod(map(int, grid)), *channels)


def check_array(numbers: Array, shape: tuple[int, ...], what: str) -> Array:
    """The array in float64; ``Unusable`` unless it has this shape and holds finite numbers."""
    if numbers.shape != shape:
        hint = ", which fits if it is transposed" if numbers.T.shape == shape else ""
        raise Unusable(f"{what} must have shape {shape}; got {numbers.shape}{hint}")
    if numbers.dtype.kind in "fiu":
        numbers = numbers.astype(np.float64)
        if (np.abs(numbers) < LARGEST).all():
            return numbers
    raise Unusable(f"{what} must hold finite numbers; got NaN, infinity, text or the like")


# A port ----------------------------------------------------------------------------------------


def read_port(folder: Path, reference: Recording) -> list[Stages]:
    """Read what a port wrote: of each picture the stages that are there, in float64, not padded.

    Raises:
        Unusable: no stage is there, or one has another name, shape, or numbers that are not finite;
            or it holds files of both kinds, or another table.
    """
    files = sorted(folder.glob("*.npy"))
    whole = folder / "stages.safetensors"
    if files and whole.exists():
        raise Unusable(
            f"{folder} holds stages.safetensors and {len(files)} .npy files: remove one of the two, "
            "which may be of an older run"
        )
    if whole.exists():
        found = read_safetensors(whole)
    else:
        found = {file.stem: read_npy(file) for file in files}
    table = found.pop(TABLE, None)
    if table is not None and reference.table is not None:
        # Rounded to bfloat16 it is still the same.
        off = check_array(table, reference.table.shape, f"{folder}: {TABLE}") - reference.table
        if np.abs(off).max() > HALF_PRECISION * np.abs(reference.table).max():
            raise Unusable(f"{folder}: its table is not the reference's: other weights")
    if not found:
        raise Unusable(f"{folder} holds no stages: write stages.safetensors, or 000.block_0.npy")
    stages = split_pictures(found, reference.order, len(reference.stages), folder)
    for number, own in enumerate(stages):
        for stage in own:
            what = f"{folder}: {number:03}.{stage}"
            own[stage] = _checked(own, stage, reference.stages[number], what)
    return stages


def _checked(port: Stages, stage: str, reference: Stages, what: str) -> Array:
    """A port's numbers of a stage, without padding, in float64."""
    numbers = port[stage]
    # Its own grid, which comes first, tells how many tokens there are.
    wanted = shape_of(stage, port.get("grid", reference["grid"]), reference[stage])
    if len(wanted) == 1 and numbers.size == wanted[0]:
        numbers = numbers.reshape(-1)  # some keep the axis of the one query
    elif numbers.ndim == 3 and len(numbers) == 1:
        numbers = numbers[0]
    if len(wanted) == 2 and numbers.ndim == 2:
        numbers = numbers[: wanted[0]]
    numbers = check_array(numbers, wanted, what)
    if stage == "grid" and not (numbers == numbers.clip(1).round()).all():
        raise Unusable(f"{what} must hold whole numbers from 1 on; got {numbers.tolist()}")
    return numbers


# Writing ---------------------------------------------------------------------------------------


def write_recording(recording: Recording, pictures: Sequence[Any], folder: Path) -> None:
    """Write a recording: the whole folder, or nothing.

    Args:
        recording: what is written; its ``about`` gets the pictures' files and hashes.
        pictures: PIL images in RGB, in order.
        folder: takes the place of what is there.

    Raises:
        OSError: the disk is full, say.
    """
    from safetensors.numpy import save

    folder = folder.resolve()
    arrays: dict[str, Array] = {}
    for number, stages in enumerate(recording.stages):
        for stage, numbers in stages.items():
            arrays[f"{number:03}.{stage}"] = np.ascontiguousarray(numbers)
    if recording.table is not None:
        arrays[TABLE] = np.ascontiguousarray(recording.table)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".naflex-fast-") as made:
        part = Path(made, folder.name)
        (part / "pictures").mkdir(parents=True)
        about = dict(recording.about)
        about["pictures"] = []
        for number, (picture, entry) in enumerate(zip(pictures, recording.about["pictures"])):
            name = f"pictures/{number:03}.png"
            picture.save(part / name)
            about["pictures"].append({"file": name, "sha256": sha256(part / name), **entry})
        text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
        (part / "recording.json").write_text(text, encoding="utf-8")
        # safetensors' own ``save_file`` lets nobody else read the file.
        (part / "stages.safetensors").write_bytes(save(arrays))
        (part / "mistakes.safetensors").write_bytes(save(dict(recording.mistakes)))
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
