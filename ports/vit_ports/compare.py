"""Where does a port part from a recording, and why? Only NumPy is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .format import PRECISIONS, Recording, Stages, read_port, read_recording
from .reasons import Reason, reason_of
from .rule import Row, stages_at

NEARLY = 2 / 3  # of its limit: a stage beyond it is the first that parts, if any does


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
            "tf32", "float16" or "bfloat16".

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
    """Compare the stages that a port made of each picture with a recording."""
    stages = stages_at(precision, reference, port)
    rows = [stage.row() for stage in stages]
    written = {row.stage for row in rows}
    not_written = [name for name in reference.order if name not in written]
    first = None
    reason = None
    if any(row.parting for row in rows):
        # A fault may grow from stage to stage, and go beyond a limit after the stage where it is
        # made.
        # Where a float32 port's own pixels widen a limit, right numbers come near it.
        nearly = [
            stage.row(1.0 if stage.moved and precision == "float32" else NEARLY) for stage in stages
        ]
        first = next(row for row in nearly if row.parting)
        place = nearly.index(first)
        if rows[place].parting:
            first = rows[place]  # with its whole limit
        rows[place] = first
        reason = reason_of(stages[place:], first.parting, reference, not_written, precision)
    return Comparison(
        rows,
        first,
        reason,
        precision,
        missing=[picture for picture, own in enumerate(port) if written - own.keys()],
        not_written=not_written,
    )
