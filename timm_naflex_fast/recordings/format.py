"""A recording on disk: pictures, and what an image tower makes of them, stage by stage.

``docs/recordings.md`` is the description of the format. Only NumPy is needed to read one.

Tests: tests/cli/test_compare.py.
"""

import hashlib
import json
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..names import did_you_mean

Array = np.ndarray[Any, Any]
Stages = dict[str, Array]  # of one picture, by stage: grid (2,), tokens (h * w, C), pooled (D,)

FORMAT = "naflex-recording"
VERSION = 1
TABLE = "table"
FROM_REFERENCE = ".from_reference"
PRECISIONS = ("float32", "float16", "bfloat16")  # in the order in which they are tried

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


def read_safetensors(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file; bfloat16 becomes float32.

    Raises:
        Unusable: the file is cut off, or holds something else.
    """
    content = file.read_bytes()
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        numbers = memoryview(content)[8 + length :]
        return {name: _array(entry, numbers) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise Unusable(
            f"{file} is no whole safetensors file ({problem}); write it again"
        ) from problem


def _array(entry: Mapping[str, Any], numbers: memoryview) -> Array:
    """One array of a safetensors file."""
    start, end = entry["data_offsets"]
    if end > len(numbers):
        raise ValueError(f"it ends at byte {len(numbers)} of {end}")
    if entry["dtype"] not in NUMBER_TYPES:
        raise ValueError(f"dtype {entry['dtype']}; valid: {', '.join(NUMBER_TYPES)}")
    array = np.frombuffer(numbers[start:end], NUMBER_TYPES[entry["dtype"]])
    if entry["dtype"] == "BF16":
        # The upper half of a float32.
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(entry["shape"])


def read_recording(folder: Path) -> Recording:
    """Read a reference: a whole recording.

    Raises:
        Unusable: something is missing, changed, or of a newer version.
    """
    about = read_about(folder)
    for picture in about["pictures"]:
        file = folder / picture["file"]
        if not file.is_file():
            raise Unusable(f"{file} is missing: a recording holds its pictures")
        if sha256(file) != picture["sha256"]:
            raise Unusable(f"{file} was changed after it was recorded (its sha256 differs)")
    found = read_safetensors(_needed(folder / "stages.safetensors"))
    table = found.pop(TABLE, None)
    order = [stage["name"] for stage in about["stages"]]
    sizes = [picture["grid"] for picture in about["pictures"]]
    stages = split_pictures(found, order, sizes, folder)
    for number, own in enumerate(stages):
        missing = [stage for stage in order if stage not in own]
        if missing:
            raise Unusable(f"{folder}: picture {number:03} lacks the stage {missing[0]}")
        # The file has an order of its own.
        stages[number] = {stage: own[stage] for stage in order}
    mistakes: dict[str, Array] = {}
    if (folder / "mistakes.safetensors").is_file():
        mistakes = read_safetensors(folder / "mistakes.safetensors")
    return Recording(about, stages, table, mistakes)


def read_about(folder: Path) -> dict[str, Any]:
    """What a folder's recording.json says.

    Raises:
        Unusable: it is not there, is not whole, or of a newer version.
    """
    file = _needed(folder / "recording.json")
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = about["version"]
        is_newer = version > VERSION
        if not is_newer:
            _check_entries(about)
    except (ValueError, KeyError, TypeError) as problem:
        raise Unusable(f"{file} does not describe a recording ({problem!r})") from problem
    if is_newer:
        raise Unusable(
            f"{file} is of version {version}; this release reads up to {VERSION}: install a newer one"
        )
    return about


def _check_entries(about: Mapping[str, Any]) -> None:
    """Look for what is read later of a recording.json; a KeyError or TypeError names what is not there."""
    if about["format"] != FORMAT or not about["pictures"] or not about["stages"]:
        raise KeyError("format")
    needed = {"pictures": ("file", "sha256", "grid"), "stages": ("name", "limits")}
    for list_name, keys in needed.items():
        for entry in about[list_name]:
            for key in keys:
                entry[key]
    for stage in about["stages"]:
        stage["limits"][PRECISIONS[0]]


def _needed(file: Path) -> Path:
    """The file, which must be there."""
    if file.is_file():
        return file
    if not file.parent.is_dir():
        raise Unusable(f"{file.parent} is no folder")
    raise Unusable(f"{file.parent} holds no {file.name}: it is no recording")


def read_port(folder: Path, reference: Recording) -> list[Stages]:
    """Read what a port wrote: of each picture the stages that it has.

    Raises:
        Unusable: no stage is there, or one has another name, shape, or numbers that are not finite;
            it holds files of both kinds; or it is of other pictures or weights.
    """
    if not folder.is_dir():
        raise Unusable(f"{folder} is no folder")
    if (folder / "recording.json").is_file():
        _check_same(read_about(folder), reference.about, folder)
    found: dict[str, Array] = {}
    files = sorted(folder.glob("*.npy"))
    if (folder / "stages.safetensors").is_file():
        if files:
            raise Unusable(
                f"{folder} holds stages.safetensors and {len(files)} .npy files: remove one of the "
                "two, which may be of an older run"
            )
        found = read_safetensors(folder / "stages.safetensors")
    for file in files:
        try:
            found[file.stem] = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as problem:
            raise Unusable(f"{file} is no whole .npy file ({problem})") from problem
    table = found.pop(TABLE, None)
    if not _is_same_table(table, reference.table):
        raise Unusable(
            f"{folder}: its table is not the reference's: other weights, or a table that was read "
            "wrongly; without it, the stages are compared"
        )
    if not found:
        raise Unusable(f"{folder} holds no stages: write stages.safetensors, or 000.block_0.npy")
    sizes = [picture["grid"] for picture in reference.about["pictures"]]
    ports = split_pictures(found, reference.order, sizes, folder)
    for number, port in enumerate(ports):
        for name, numbers in port.items():
            port[name] = _checked(numbers, reference, port, number, name)
    return ports


def _check_same(port: Mapping[str, Any], reference: Mapping[str, Any], folder: Path) -> None:
    """Refuse a recording of other pictures."""
    pictures = [picture["sha256"] for picture in port["pictures"]]
    if pictures != [picture["sha256"] for picture in reference["pictures"]]:
        raise Unusable(f"{folder} is a recording of other pictures: record it with the reference's")


def _is_same_table(table: Array | None, reference: Array | None) -> bool:
    """Whether two position tables are equal, to the rounding of half a precision."""
    if table is None or reference is None:
        return True
    if table.shape != reference.shape:
        return False
    return bool(np.abs(table - reference).max() <= HALF_PRECISION * np.abs(reference).max())


def split_pictures(
    found: Mapping[str, Array], order: Sequence[str], sizes: Sequence[Sequence[int]], folder: Path
) -> list[Stages]:
    """Arrays under their names, as the stages of each picture.

    ``000.block_3`` is that of one picture, ``block_3`` a padded batch of all.

    Raises:
        Unusable: a name that no stage and no picture has, or a batch of another length.
    """
    stages: list[Stages] = [{} for _ in sizes]
    for name, numbers in found.items():
        match = re.fullmatch(r"(?:(\d+)\.)?(.*?)(\.from_reference)?", name)
        assert match  # the pattern takes every name
        picture, stage, suffix = match.groups(default="")
        if stage not in order:
            hint = did_you_mean(stage, order)
            block = re.match(r"block_\d+", stage)
            if block and block[0] not in order:
                hint = ", as the reference has fewer blocks"
            raise Unusable(
                f"{folder}: there is no stage {stage!r}{hint}; valid: {', '.join(order)}"
            )
        if picture:
            if int(picture) >= len(sizes):
                raise Unusable(f"{folder}: {name}: there are {len(sizes)} pictures, from 000 on")
            stages[int(picture)][stage + suffix] = numbers
            continue
        if numbers.ndim < 2 or len(numbers) != len(sizes):
            raise Unusable(
                f"{folder}: {name} has shape {numbers.shape}; a batch has {len(sizes)} pictures first"
            )
        for own, one in zip(stages, numbers):
            own[stage + suffix] = one
    return stages


def _checked(numbers: Array, reference: Recording, port: Stages, picture: int, name: str) -> Array:
    """A port's numbers of a stage, without padding, in float64 (a grid in integers)."""
    stage = name.removesuffix(FROM_REFERENCE)
    expected = reference.stages[picture][stage]
    what = f"{picture:03}.{name}"
    if stage == "grid":
        if numbers.size != 2 or not (np.asarray(numbers, float) % 1 == 0).all():
            raise Unusable(f"{what} must be two whole numbers, rows and columns; got {numbers}")
        return numbers.reshape(2).astype(int)
    wanted = expected.shape
    if stage == "pooled":
        # Some keep the axis of the one query.
        numbers = numbers.reshape(-1) if numbers.size == wanted[0] else numbers
    elif "grid" in port:
        # Where the grids differ, the tokens are counted by the port's own.
        wanted = (int(np.prod(np.asarray(port["grid"], int))), *wanted[1:])
    if numbers.ndim == 3 and len(numbers) == 1:
        numbers = numbers[0]
    is_batch = numbers.ndim == len(wanted) == 2 and numbers.shape[1] == wanted[1]
    if is_batch and len(numbers) > wanted[0]:
        numbers = numbers[: wanted[0]]
    if numbers.shape != wanted:
        hint = ", which fits if it is transposed" if numbers.T.shape == wanted else ""
        raise Unusable(f"{what} must have shape {wanted}; got {numbers.shape}{hint}")
    if numbers.dtype.kind not in "fiu":
        raise Unusable(f"{what} must hold numbers; got dtype {numbers.dtype}")
    bad = ~np.isfinite(numbers)
    if bad.any():
        first = tuple(map(int, np.argwhere(bad)[0]))
        raise Unusable(
            f"{what} holds {bad.sum()} numbers that are NaN or infinite, first at {first}"
        )
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
