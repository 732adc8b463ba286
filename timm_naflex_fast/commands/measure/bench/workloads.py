"""The grids of a batch of random images, and their coordinates.

Importing this file needs neither torch nor timm.

Tests: tests/commands/measure/bench/test_model.py.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

Grid = tuple[int, int]  # (h, w), in patches
Draw = Callable[[random.Random], Grid]
PATCH = 16
DRAWN_IMAGE = 2**20  # pixels of the images from which grids of a given aspect ratio are made


def fit_aspect(aspect: float, tokens: int) -> Grid:
    """The grid of a large image whose width is ``aspect`` times its height, in at most ``tokens``
    patches.
    """
    from timm.data.naflex_transforms import get_image_size_for_seq

    # timm's own search, so that the grids are those that its loader would make.
    image = (math.sqrt(DRAWN_IMAGE / aspect), math.sqrt(DRAWN_IMAGE * aspect))
    _, (height, width) = get_image_size_for_seq(image, PATCH, tokens)
    return height // PATCH, width // PATCH


def siglip_grids(tokens: int) -> Draw:
    """Aspect ratios from 1:3 to 3:1, even in the logarithm, as large as fits ``tokens``."""
    return lambda source: fit_aspect(3 ** source.uniform(-1, 1), tokens)


def coordinates(grids: Sequence[Grid], length: int = 0) -> Any:
    """Coordinates of the tokens as timm's collator makes them: row-major, then (0, 0).

    Args:
        grids: of the B samples.
        length: N; the most tokens of a sample if it is 0.

    Returns:
        (B, N, 2), each (y, x), int64.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    cells = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in grids]
    # One more sample, which is as long as the others have to be at least.
    cells.append(torch.zeros(length, 2, dtype=torch.long))
    return pad_sequence(cells, batch_first=True)[:-1]
