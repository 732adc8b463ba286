"""What counts as rounding at each stage of a recording.

Float32's limits are fixed. Those of lower precisions, and of pixels that another resizer rounded, are
measured: the recorded tower runs so.

Tests: ports/tests/test_limits.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .format import OWN_PIXELS, Recording, Stages
from .rule import Stage
from .towers import Tower

# From the grid and the pixels of pictures to all their stages, computed in a precision of this name.
Run = Callable[[Sequence[Stages], str], list[Stages]]

# Times what was moved: another port rounds at other places. TF32 has as many bits as float16, but
# hardware cuts the operands of products off where float16 rounds, which moves up to twice as much.
# Right ports of 25 other makes (other sums, fused and folded kernels, padding) came up to 0.56 of float16's limits,
# 0.69 of tf32's, 0.63 of bfloat16's, 0.51 of int8's with activations in 8 bits; with own pixels to 0.5, in int8 0.94.
ROOM = {"float16": 3.0, "tf32": 6.0, "bfloat16": 3.0, "int8": 3.0, OWN_PIXELS: 2.0}
# What shares a scale where weights have 8 bits: 32 numbers, a row or a kernel. None is the coarsest everywhere.
INT8 = ("int8_by_block", "int8_by_row", "int8_by_tensor")
PICTURES = 10  # are enough


def with_limits(tower: Tower, recording: Recording, run: Run) -> Recording:
    """A recording with its limits, by stage, precision and measure.

    Args:
        tower: which one was recorded.
        recording: its stages, in float32.
        run: runs it in "float32", "float16", "bfloat16", and in float32 with weights as ``INT8``.
    """
    given = recording.stages[:PICTURES]
    std = recording.about["std"]
    random = np.random.default_rng(0)
    noisy = []
    for own in given:
        pixels = own["pixels"]  # (N, p * p * 3)
        # Rounding to whole grey levels moves a pixel by one level.
        levels = random.integers(-1, 2, pixels.shape)
        level = 1 / np.multiply(255, std)
        moved = levels * np.resize(level, pixels.shape[1])
        noisy.append({**own, "pixels": pixels + moved})
    right = run(given, "float32")
    half = run(given, "float16")
    made = {
        "float16": [half],
        "tf32": [half],
        "bfloat16": [run(given, "bfloat16")],
        "int8": [run(given, name) for name in INT8],
        OWN_PIXELS: [run(noisy, "float32")],
    }
    stages = []
    for stage in recording.order:
        smallest = tower.float32_limits(stage)
        limits = {"float32": smallest}
        for name, runs in made.items():
            limits[name] = smallest
            for ours in runs:
                limits[name] = wider(stage, limits[name], ours, right, std, ROOM[name])
        stages.append({"name": stage, "limits": limits})
    return replace(recording, about={**recording.about, "stages": stages})


def wider(
    stage: str,
    smallest: dict[str, float],
    ours: Sequence[Stages],
    right: Sequence[Stages],
    std: Sequence[float],
    room: float,
) -> dict[str, float]:
    """A stage's limits by measure: ``room`` times what the worst picture has, or the smallest ones."""
    limits = dict(smallest)
    reference = [own[stage] for own in right]
    port = dict(enumerate(own[stage] for own in ours))
    compared = Stage(stage, reference, port, std, limits)
    for picture, numbers in enumerate(reference):
        for measure, off in compared.differences(picture, numbers).items():
            limit = min(room * float(off.max()), 1.0)  # all of a number
            limits[measure] = max(limits[measure], limit)
    return limits
