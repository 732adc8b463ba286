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
    content = file.read_bytes()
    return hashlib.sha256(content).hexdigest()


def sampled(numbers: Array) -> Array:
    """A few rows of an array, from the first to the last, as mistakes.safetensors holds them."""
    if numbers.ndim < 2 or len(numbers) <= SAMPLE:
        return numbers
    # Closer at first: at equal distances they would be the diagonal of a grid of 6 x 6.
    last = len(numbers) - 1
    shares = np.linspace(0, 1, SAMPLE) ** 1.5
    rows = (last * shares).round()
    return numbers[rows.astype(int)]


# Arrays ----------------------------------------------------------------------------------------


def read_safetensors(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, bfloat16 as float32.

    Raises:
        Unusable: the file is cut off, has too many bytes, or holds something else.
    """
    from safetensors import SafetensorError, deserialize

    arrays = {}
    try:
        content = _needed(file).read_bytes()
        for name, entry in deserialize(content):
            number_type = entry["dtype"]
            array = np.frombuffer(entry["data"], NUMBER_TYPES[number_type])
            if number_type == "BF16":
                # The upper half of a float32.
                upper = array.astype("<u4")
                array = (upper << 16).view("<f4")
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
        end = array.offset + array.nbytes
        if end != file.stat().st_size:
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
        channels = table.shape[-1:]
        shape = (*about["table_size"], *channels)
        check_array(table, shape, f"{file}: {TABLE}")
    order = [stage["name"] for stage in about["stages"]]
    pictures = about["pictures"]
    stages = split_pictures(found, order, len(pictures), folder)
    for number, picture in enumerate(pictures):
        _check_stages(stages, number, picture["grid"], order, file)
    # A recording may come without what known mistakes give.
    mistakes: dict[str, Array] = {}
    mistakes_file = folder / "mistakes.safetensors"
    if mistakes_file.exists():
        mistakes = read_safetensors(mistakes_file)
    return Recording(about, stages, table, mistakes)


def _check_stages(
    stages: Sequence[Stages], number: int, grid: list[int], order: Sequence[str], file: Path
) -> None:
    """Raise ``Unusable`` unless a picture has all stages, in the shapes that its grid gives."""
    own = stages[number]
    for stage in order:
        what = f"{number:03}.{stage}"
        if stage not in own:
            raise Unusable(f"{file} holds no {what}")
        # As many channels as in the first picture.
        like = stages[0][stage]
        shape = shape_of(stage, grid, like)
        check_array(own[stage], shape, f"{file}: {what}")
    if own["grid"].tolist() != grid:
        raise Unusable(f"{file}: {number:03}.grid is not the one of recording.json")


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's recording.json says.

    Raises:
        Unusable: it is not there, is not whole, or of another version.
    """
    file = _needed(folder / "recording.json")
    try:
        text = file.read_text(encoding="utf-8")
        about: dict[str, Any] = json.loads(text)
        if about["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if about["version"] == VERSION:
            _check_about(about)
    except (LookupError, TypeError, ValueError, RecursionError) as problem:
        raise Unusable(f"{file} does not describe a recording ({problem!r})") from problem
    version = about["version"]
    if version != VERSION:
        raise Unusable(
            f"{file} is of version {version!r}; this release reads {VERSION}: record it "
            "anew, or install the release that wrote it"
        )
    return about


def _check_about(about: Mapping[str, Any]) -> None:
    """Raise ``LookupError``, ``TypeError`` or ``ValueError`` unless all is there that is read."""
    positive = _sides_and_counts(about)
    names = [stage["name"] for stage in about["stages"]]
    pictures = about["pictures"]
    has_all = bool(pictures)
    if names[:1] != ["grid"]:
        has_all = False
    if len(set(names)) < len(names):
        has_all = False
    if not has_all:
        raise ValueError("it must have pictures, and stages of different names, grid first")
    for stage in about["stages"]:
        positive += _limits_of(stage)
    for number in positive:
        if not 0 < number < LARGEST:
            raise ValueError(f"{number} is no number above 0")
    known = set(range(len(pictures)))
    for mistake in about["mistakes"]:
        Path(mistake["name"], mistake["words"])  # they must be texts
        names.index(mistake["stage"])
        shown = set(mistake["pictures"])
        if not shown <= known:
            raise ValueError(f"there is no such picture of mistake {mistake['name']!r}")


def _sides_and_counts(about: Mapping[str, Any]) -> list[Any]:
    """What recording.json says in numbers above 0, without the limits."""
    red, green, blue = about["std"]
    height, width = about["table_size"]
    positive = [red, green, blue]
    positive += [height, width]
    positive.append(about["mistakes_tried"] + 1)
    positive.append(about["patch_size"])
    positive.append(about["max_patches"])
    positive.append(about["heads"])
    for picture in about["pictures"]:
        height, width = picture["size"]
        positive += [height, width]
        positive += picture["grid"]
        Path(picture["file"], picture["name"])  # they must be texts
    return positive


def _limits_of(stage: Mapping[str, Any]) -> list[Any]:
    """The limits of an entry of a stage, all that are read."""
    limits = stage["limits"]
    measures = float32_limits(stage["name"])
    found = []
    for precision in {*PRECISIONS, *limits}:
        of_precision = limits[precision]
        for measure in measures:
            found.append(of_precision[measure])
    return found


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
    places = _places(order, count)
    for name, numbers in found.items():
        _, _, stage = name.rpartition(".")
        if name in places:
            number = places[name]
            written = {number: numbers}
        elif name in order:
            batch = np.atleast_1d(numbers)
            written = dict(enumerate(batch))
            if len(written) != count:
                raise Unusable(
                    f"{folder}: {name}: a batch has {count} pictures; got {len(written)}"
                )
        else:
            hint = did_you_mean(name, [*places, *order])
            last = f"{count - 1:03}"
            valid = ", ".join(order)
            raise Unusable(
                f"{folder}: there is no {name!r}{hint}; valid: 000 to {last}, and after a dot {valid}"
            )
        for number, one in written.items():
            own = stages[number]
            if stage in own:
                raise Unusable(f"{folder} holds {number:03}.{stage} twice, once in {name}")
            own[stage] = one
    return [_in_order(own, order) for own in stages]


def _places(order: Sequence[str], count: int) -> dict[str, int]:
    """The names of arrays that belong to one picture, and its number: {"000.block_3": 0}."""
    found = {}
    for number in range(count):
        for stage in order:
            name = f"{number:03}.{stage}"
            found[name] = number
    return found


def _in_order(stages: Stages, order: Sequence[str]) -> Stages:
    """The stages of a picture in the order in which data flows: a file has an order of its own."""
    found = {}
    for stage in order:
        if stage in stages:
            found[stage] = stages[stage]
    return found


def shape_of(stage: str, grid: Iterable[int], like: Array) -> tuple[int, ...]:
    """The shape of a stage of a picture that has this grid; ``like``: the stage of another one."""
    channels = like.shape[-1:]
    if stage in ("grid", "pooled"):
        return channels
    sides = [int(side) for side in grid]
    tokens = math.prod(sides)
    return (tokens, *channels)


def check_array(numbers: Array, shape: tuple[int, ...], what: str) -> Array:
    """The array in float64; ``Unusable`` unless it has this shape and holds finite numbers."""
    if numbers.shape != shape:
        hint = ""
        if numbers.T.shape == shape:
            hint = ", which fits if it is transposed"
        raise Unusable(f"{what} must have shape {shape}; got {numbers.shape}{hint}")
    if numbers.dtype.kind in "fiu":
        numbers = numbers.astype(np.float64)
        is_finite = np.abs(numbers) < LARGEST
        if is_finite.all():
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
        _check_table(table, reference.table, folder)
    if not found:
        raise Unusable(f"{folder} holds no stages: write stages.safetensors, or 000.block_0.npy")
    stages = split_pictures(found, reference.order, len(reference.stages), folder)
    for number, own in enumerate(stages):
        right = reference.stages[number]
        for stage in own:
            what = f"{folder}: {number:03}.{stage}"
            own[stage] = _checked(own, stage, right, what)
    return stages


def _check_table(table: Array, right: Array, folder: Path) -> None:
    """Raise ``Unusable`` unless a port's table is the right one; rounded to bfloat16 it still is."""
    numbers = check_array(table, right.shape, f"{folder}: {TABLE}")
    off = np.abs(numbers - right)
    largest = np.abs(right).max()
    if off.max() > HALF_PRECISION * largest:
        raise Unusable(f"{folder}: its table is not the reference's: other weights")


def _checked(port: Stages, stage: str, reference: Stages, what: str) -> Array:
    """A port's numbers of a stage, without padding, in float64."""
    numbers = port[stage]
    # Its own grid, which comes first, tells how many tokens there are.
    grid = port.get("grid", reference["grid"])
    wanted = shape_of(stage, grid, reference[stage])
    if len(wanted) == 1 and numbers.size == wanted[0]:
        numbers = numbers.reshape(-1)  # some keep the axis of the one query
    elif numbers.ndim == 3 and len(numbers) == 1:
        numbers = numbers[0]
    if len(wanted) == 2 and numbers.ndim == 2:
        numbers = numbers[: wanted[0]]
    numbers = check_array(numbers, wanted, what)
    if stage == "grid":
        valid = numbers.clip(1).round()
        is_valid = numbers == valid
        if not is_valid.all():
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
            name = f"{number:03}.{stage}"
            arrays[name] = np.ascontiguousarray(numbers)
    if recording.table is not None:
        arrays[TABLE] = np.ascontiguousarray(recording.table)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".naflex-fast-") as made:
        part = Path(made, folder.name)
        about = dict(recording.about)
        about["pictures"] = _write_pictures(pictures, about["pictures"], part)
        text = json.dumps(about, indent=1, ensure_ascii=False)
        (part / "recording.json").write_text(text + "\n", encoding="utf-8")
        # safetensors' own ``save_file`` lets nobody else read the file.
        content = save(arrays)
        (part / "stages.safetensors").write_bytes(content)
        mistakes = dict(recording.mistakes)
        content = save(mistakes)
        (part / "mistakes.safetensors").write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)


def _write_pictures(
    pictures: Sequence[Any], entries: Sequence[Mapping[str, Any]], folder: Path
) -> list[dict[str, Any]]:
    """Write the pictures below a folder; return their entries, with file and hash."""
    (folder / "pictures").mkdir(parents=True)
    found = []
    for number, (picture, entry) in enumerate(zip(pictures, entries)):
        name = f"pictures/{number:03}.png"
        file = folder / name
        picture.save(file)
        written = {"file": name, "sha256": sha256(file)}
        found.append({**written, **entry})
    return found
