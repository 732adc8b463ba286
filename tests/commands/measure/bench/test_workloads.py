"""The bench's material: random grids, and their coordinates."""

import random

import numpy as np

from timm_naflex_fast.commands.measure.bench.workloads import siglip_grids


def test_random_grids_are_as_large_as_fits():
    draw = siglip_grids(256)
    source = random.Random(0)
    h, w = np.array([draw(source) for _ in range(1000)]).T
    # One more row and column never fits.
    assert (h * w <= 256).all() and ((h + 1) * (w + 1) > 256).all()
    # Aspects lie in [1/3, 3], as many tall ones as wide ones.
    logs = np.log(w / h) / np.log(3)
    assert np.abs(logs).max() < 1.15 and abs(logs.mean()) < 0.1
