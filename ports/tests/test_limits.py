"""What counts as rounding is what a tower's rounding moves, times some room."""

import numpy as np
import pytest
from on_the_kit import recording

from vit_ports.limits import with_limits
from vit_ports.towers.siglip2 import SIGLIP2

ROUNDS = {"float32": 0.0, "float16": 1e-3, "bfloat16": 1e-2}
ROUNDS |= {"int8_by_block": 1e-3, "int8_by_row": 2e-2, "int8_by_tensor": 5e-3}


def run(given, precision):
    """A tower whose stages move by as much as a precision rounds, and as its pixels were moved."""
    made = []
    for own, right in zip(given, recording().stages):
        moved = np.abs(own["pixels"] - right["pixels"]).max()
        assert moved in (0, pytest.approx(2 / 255))  # a grey level
        share = 1 + ROUNDS[precision] + moved / 10
        made.append({**own, "block_0": share * right["block_0"], "pooled": 99 * right["pooled"]})
        if share == 1:
            made[-1] = right
    return made


def test_limits_are_what_was_moved_with_room_but_never_below_float32s():
    limits = with_limits(SIGLIP2, recording(), run).limits
    for name, expected in dict(
        tf32=6e-3, float16=3e-3, bfloat16=3e-2, int8=6e-2, own_pixels=0.4 / 255
    ).items():
        assert limits["block_0"][name]["token"] == pytest.approx(max(expected, 3e-5)), name
        assert limits["pooled"][name] == {"number": 1}
        assert limits["norm"][name] == limits["norm"]["float32"]
    assert limits["norm"]["float32"] == {"token": 3e-5, "channel": 1e-4}
