"""Where does a port part from a recording, and why? Only NumPy is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .format import PRECISIONS, Recording, Stages, Unusable, read_port, read_recording
from .reasons import Reason, reason_of
from .rule import JUMP, NEARLY, Row, Stage, stages_at


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        rows: one for each stage that the port wrote, in the order in which data flows.
        first: that of the first stage at which any picture is beyond rounding, or None.
        reason: why it parts there; None where none does.
        precision: the port's, as it was said.
        missing: the pictures that lack a stage which the port wrote of another one.
        not_written: the stages that the port wrote of no picture.
    """

    rows: Sequence[Row]
    first: Row | None
    reason: Reason | None
    precision: str
    missing: Sequence[int]
    not_written: Sequence[str]


def compare_folders(
    reference: str | Path, port: str | Path, precision: str = "float32"
) -> Comparison:
    """Compare what a port wrote with a recording.

    Args:
        reference: folder of the recording.
        port: folder of the port's stages.safetensors or .npy files.
        precision: in which the port computes, or to which its weights were rounded: "float32",
            "float16", "tf32", "bfloat16" or "int8".

    Returns:
        The rows, and the reason.

    Raises:
        ValueError: a folder that cannot be compared, or another precision.
        OSError: a file cannot be read.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    recording = read_recording(Path(reference))
    return compare_recordings(recording, read_port(Path(port), recording), precision)


def compare_recordings(
    reference: Recording, port: Sequence[Stages], precision: str = "float32"
) -> Comparison:
    """Compare the stages that a port made of each picture with a recording.

    Raises:
        Unusable: the recording has no limits for the precision.
    """
    known = reference.limits[reference.order[0]]
    if precision not in known:
        raise Unusable(
            f"the recording has no limits for {precision}, only for {', '.join(known)}: record it anew"
        )
    stages = stages_at(precision, reference, port)
    rows = [stage.row() for stage in stages]
    written = {row.stage for row in rows}
    not_written = [name for name in reference.order if name not in written]
    first = None
    reason = None
    if any(row.parting for row in rows):
        place, part = first_that_parts(stages, precision)
        first = rows[place] = stages[place].row(part)
        reason = reason_of(stages, place, first.parting, reference, port, precision)
    return Comparison(
        rows,
        first,
        reason,
        precision,
        missing=[picture for picture, own in enumerate(port) if written - own.keys()],
        not_written=not_written,
    )


def first_that_parts(stages: Sequence[Stage], precision: str) -> tuple[int, float]:
    """The place of the first stage where a port parts, and beyond which part of a limit it does.

    A fault may grow: it is the first one beyond a whole limit, or one from which the fault grew to that.
    """
    whole = next(place for place, stage in enumerate(stages) if stage.farthest > 1)
    place = whole
    while place:
        before = stages[place - 1]
        # Where a float32 port's own pixels widen a limit, right numbers come near it.
        widened = before.moved and precision == "float32"
        grows = before.farthest < stages[place].farthest <= JUMP * before.farthest
        if widened or before.farthest <= NEARLY or not grows:
            break
        place -= 1
    return place, 1.0 if place == whole else NEARLY
