"""A recording on disk: pictures, and what an image tower makes of them, stage by stage.

``docs/recordings.md`` is the description of the format. To read one, NumPy and safetensors are
enough.

Tests: tests/commands/cli/test_compare.py.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...names import did_you_mean

Array = np.ndarray[Any, Any]
Stages = dict[str, Array]  # of one picture, by stage: grid (2,), tokens (h * w, C), pooled (D,)

FORMAT = "naflex-recording"
VERSION = 1
TABLE = "table"
PRECISIONS = ("float32", "float16", "bfloat16")

GREY_LEVELS = 2.01 * 2 / 255
"""Two right resizers may part by as much: each rounds to whole grey levels after either of its two
passes, which moves a pixel by less than 1.5 levels. Pixels reach from -1 to 1."""
EMBEDDINGS = 2e-6
LATER = 2e-5
"""What float32 may move a number by, as a share of the stage's largest: embeddings, what follows."""
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
        mistakes: what known mistakes give instead: {"NAME/000.STAGE": numbers}.
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
    def limits(self) -> dict[str, Mapping[str, float]]:
        """Of each stage, the largest difference that is rounding, by precision."""
        return {stage["name"]: stage["limits"] for stage in self.about["stages"]}


@dataclass(frozen=True)
class Port:
    """What a port wrote.

    Attributes:
        stages: of each picture those that it has.
        precision: the smallest one in which it wrote an array.
    """

    stages: Sequence[Stages]
    precision: str = "float32"


def float32_limit(stage: str) -> float:
    """What float32 may move a number of a stage by, as a share of the stage's largest number."""
    if stage == "grid":
        return 0.0
    if stage == "pixels":
        return GREY_LEVELS
    return EMBEDDINGS if stage.endswith("_embedding") else LATER


def stage_entry(name: str, limits: Mapping[str, float]) -> dict[str, Any]:
    """What recording.json says of a stage."""
    layout, shape = LAYOUTS.get(name, (f"the output of {name}", ["h * w", "C"]))
    return {"name": name, "layout": layout, "shape": shape, "limits": dict(limits)}


def sha256(file: Path) -> str:
    """The hash of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_safetensors(file: Path) -> tuple[dict[str, Array], str]:
    """The arrays of a safetensors file, bfloat16 as float32; and the smallest precision in it.

    Raises:
        Unusable: the file is cut off, or holds something else.
    """
    from safetensors import SafetensorError, deserialize

    arrays = {}
    precision = "float32"
    try:
        for name, entry in deserialize(file.read_bytes()):
            array = np.frombuffer(entry["data"], NUMBER_TYPES[entry["dtype"]])
            if entry["dtype"] == "F16":
                precision = "float16"
            if entry["dtype"] == "BF16":
                precision = "bfloat16"
                # The upper half of a float32.
                array = (array.astype("<u4") << 16).view("<f4")
            arrays[name] = array.reshape(entry["shape"])
    except (SafetensorError, KeyError) as problem:
        raise Unusable(
            f"{file} is no whole safetensors file ({problem}); write it again"
        ) from problem
    return arrays, precision


def read_recording(folder: Path) -> Recording:
    """Read a reference: a whole recording.

    Raises:
        Unusable: something is missing, or of a newer version.
    """
    about = read_about(folder)
    found, _ = read_safetensors(_needed(folder / "stages.safetensors"))
    table = found.pop(TABLE, None)
    try:
        order = [stage["name"] for stage in about["stages"] if stage["limits"]["float32"] >= 0]
        sizes = [picture["grid"] for picture in about["pictures"]]
        own = split_pictures(found, order, len(sizes), folder)
        # The file has an order of its own.
        stages = [{stage: one[stage] for stage in order} for one in own]
    except (KeyError, TypeError) as problem:
        raise Unusable(f"{folder} is no whole recording ({problem!r})") from problem
    mistakes: dict[str, Array] = {}
    if (folder / "mistakes.safetensors").is_file():
        mistakes, _ = read_safetensors(folder / "mistakes.safetensors")
    return Recording(about, stages, table, mistakes)


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's recording.json says.

    Raises:
        Unusable: it is not there, is not whole, or of a newer version.
    """
    file = _needed(folder / "recording.json")
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise Unusable(f"{file} does not describe a recording ({problem!r})") from problem
    if about.get("format") != FORMAT:
        raise Unusable(f"{file} does not describe a recording: its format is not {FORMAT}")
    if about.get("version") != VERSION:
        raise Unusable(
            f"{file} is of version {about.get('version')}; this release reads {VERSION}: install a "
            "newer one"
        )
    return about


def _needed(file: Path) -> Path:
    """The file, which must be there."""
    if file.is_file():
        return file
    raise Unusable(f"{file.parent} holds no {file.name}: it is no recording")


def read_port(folder: Path, reference: Recording) -> Port:
    """Read what a port wrote.

    Raises:
        Unusable: no stage is there, or one has another name, shape, or numbers that are not finite;
            or it holds files of both kinds, or another table.
    """
    files = sorted(folder.glob("*.npy"))
    whole = folder / "stages.safetensors"
    if files and whole.is_file():
        raise Unusable(
            f"{folder} holds stages.safetensors and {len(files)} .npy files: remove one of the two, "
            "which may be of an older run"
        )
    if not files and not whole.is_file():
        raise Unusable(f"{folder} holds no stages: write stages.safetensors, or 000.block_0.npy")
    found: dict[str, Array] = {}
    precision = "float32"
    if whole.is_file():
        found, precision = read_safetensors(whole)
    for file in files:
        try:
            found[file.stem] = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as problem:
            raise Unusable(f"{file} is no whole .npy file ({problem})") from problem
        if found[file.stem].dtype == np.float16:
            precision = "float16"
    if not _is_same_table(found.pop(TABLE, None), reference.table):
        raise Unusable(f"{folder}: its table is not the reference's: other weights")
    stages = split_pictures(found, reference.order, len(reference.stages), folder)
    for number, own in enumerate(stages):
        for stage in own:
            what = f"{number:03}.{stage}"
            own[stage] = _checked(own[stage], stage, reference.stages[number], own, what)
    return Port(stages, precision)


def _is_same_table(table: Array | None, reference: Array | None) -> bool:
    """Whether two position tables are equal, to the rounding of half a precision."""
    if table is None or reference is None:
        return True
    if table.shape != reference.shape:
        return False
    return bool(np.abs(table - reference).max() <= HALF_PRECISION * np.abs(reference).max())


def split_pictures(
    found: Mapping[str, Array], order: Sequence[str], count: int, folder: Path
) -> list[Stages]:
    """Arrays under their names, as the stages of each of ``count`` pictures.

    ``000.block_3`` is that of one picture, ``block_3`` a padded batch of all.

    Raises:
        Unusable: a name that no stage and no picture has, or a batch of another length.
    """
    stages: list[Stages] = [{} for _ in range(count)]
    for name, numbers in found.items():
        number, _, stage = name.rpartition(".")
        if stage not in order:
            hint = did_you_mean(stage, order)
            raise Unusable(
                f"{folder}: there is no stage {stage!r}{hint}; valid: {', '.join(order)}"
            )
        if number:
            if not number.isdigit() or int(number) >= count:
                raise Unusable(f"{folder}: {name}: there are {count} pictures, from 000 on")
            stages[int(number)][stage] = numbers
            continue
        if len(np.atleast_1d(numbers)) != count:
            raise Unusable(
                f"{folder}: {name} has shape {numbers.shape}; a batch has {count} pictures first"
            )
        for own, one in zip(stages, numbers):
            own[stage] = one
    return stages


def _checked(numbers: Array, stage: str, reference: Stages, port: Stages, what: str) -> Array:
    """A port's numbers of a stage, without padding, in float64."""
    wanted = reference[stage].shape
    if stage not in ("grid", "pooled") and "grid" in port:
        # Where the grids differ, the tokens are counted by the port's own.
        wanted = (int(np.prod(port["grid"])), wanted[1])
    if len(wanted) == 1 and numbers.size == wanted[0]:
        numbers = numbers.reshape(-1)  # some keep the axis of the one query
    elif numbers.ndim == 3 and len(numbers) == 1:
        numbers = numbers[0]
    if len(wanted) == 2 and numbers.ndim == 2:
        numbers = numbers[: wanted[0]]
    if numbers.shape != wanted:
        hint = ", which fits if it is transposed" if numbers.T.shape == wanted else ""
        raise Unusable(f"{what} must have shape {wanted}; got {numbers.shape}{hint}")
    if numbers.dtype.kind not in "fiu" or not np.isfinite(numbers).all():
        raise Unusable(f"{what} must hold finite numbers; got NaN, infinity or {numbers.dtype}")
    return numbers.astype(np.float64)


def write_recording(recording: Recording, pictures: Sequence[Any], folder: Path) -> None:
    """Write a recording: the whole folder, or nothing.

    Args:
        recording: what is written; its ``about`` gets the pictures' files and hashes.
        pictures: PIL images in RGB, in order.
        folder: takes the place of what is there.
    """
    from safetensors.numpy import save_file

    folder = folder.resolve()
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
        save_file(dict(_named(recording)), part / "stages.safetensors")
        save_file(dict(recording.mistakes), part / "mistakes.safetensors")
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)


def _named(recording: Recording) -> Iterator[tuple[str, Array]]:
    """The arrays of stages.safetensors."""
    for number, stages in enumerate(recording.stages):
        for stage, numbers in stages.items():
            yield f"{number:03}.{stage}", np.ascontiguousarray(numbers)
    if recording.table is not None:
        yield TABLE, np.ascontiguousarray(recording.table)
