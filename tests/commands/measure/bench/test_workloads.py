"""The bench's material: random grids, and their coordinates."""

import random

import numpy as np
import torch

from timm_naflex_fast.commands.measure.bench.workloads import coordinates, siglip_grids


def test_random_grids_are_as_large_as_fits():
    draw = siglip_grids(256)
    source = random.Random(0)
    h, w = np.array([draw(source) for _ in range(1000)]).T
    # One more row and column never fits.
    assert (h * w <= 256).all() and ((h + 1) * (w + 1) > 256).all()
    # Aspects lie in [1/3, 3], as many tall ones as wide ones.
    logs = np.log(w / h) / np.log(3)
    assert np.abs(logs).max() < 1.15 and abs(logs.mean()) < 0.1


def test_coordinates_are_row_by_row_then_padding():
    first, second = coordinates([(2, 1), (1, 3)], 4).tolist()
    assert first == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert second == [[0, 0], [0, 1], [0, 2], [0, 0]]
    assert coordinates([(2, 2)]).shape == (1, 4, 2) and coordinates([(1, 1)]).dtype == torch.long
