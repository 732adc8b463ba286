"""SigLIP-2's image tower (NaFlex): its port in NumPy, known mistakes, and float32's limits."""

from pathlib import Path

from .. import Tower
from . import wrong_lines

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
"""What float32 may move a stage by, in each of its measures; ``LATER`` for those that are not here.

On the kit right ports of 25 other makes came up to 0.06 of these, but for pixels.
"""


def float32_limits(stage: str) -> dict[str, float]:
    """What float32 may move a stage by; see ``Tower``."""
    return dict(FLOAT32.get(stage, LATER))


FOLDER = Path(__file__).parent
SIGLIP2 = Tower(
    port=FOLDER / "port_in_numpy.py",
    mistakes=FOLDER / "mistakes.diff",
    block=("return block(", "return x if number == {} else block("),
    names=vars(wrong_lines),
    float32_limits=float32_limits,
)
