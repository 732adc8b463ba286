"""Where does a port part from a recording, and why? Only NumPy is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import PRECISIONS
from .format import Recording, Stages, read_port, read_recording
from .reasons import Reason, reason_of
from .rule import Row, stages_at

NEARLY = 2 / 3  # of its limit: a stage beyond it is the first that parts, if any does


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        rows: one for each stage that the port wrote, in the order in which data flows.
        reason: why the first one parts that does; None where none does.
        precision: the port's, as it was said.
        missing: the pictures that lack a stage which the port wrote of another one.
        not_written: the stages that the port wrote of no picture.
    """

    rows: Sequence[Row]
    reason: Reason | None
    precision: str
    missing: Sequence[int]
    not_written: Sequence[str]

    @property
    def first(self) -> Row | None:
        """The first stage at which any picture is beyond rounding."""
        parting = (row for row in self.rows if row.parting)
        return next(parting, None)


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
    reason = None
    if any(row.parting for row in rows):
        # A fault may grow from stage to stage, and go beyond a limit after the stage where it is
        # made.
        nearly = [stage.row(NEARLY) for stage in stages]
        is_beyond = [bool(row.parting) for row in nearly]
        place = is_beyond.index(True)
        if not rows[place].parting:
            rows[place] = nearly[place]
        reason = reason_of(stages[place:], rows[place].parting, reference, port, precision)
    written = {row.stage for row in rows}
    return Comparison(
        rows,
        reason,
        precision,
        missing=[picture for picture, own in enumerate(port) if written - own.keys()],
        not_written=[name for name in reference.order if name not in written],
    )
