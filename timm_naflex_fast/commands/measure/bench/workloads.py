"""The grids of a batch: of random images, or of a folder's.

Importing this file needs neither torch nor timm.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Grid = tuple[int, int]  # (h, w), in patches
Draw = Callable[[random.Random], Grid]
DRAWN_IMAGE = 2**20  # pixels of the images from which grids of a given aspect ratio are made


@dataclass(frozen=True)
class Workload:
    """Batches of grids.

    Attributes:
        name: in tables.
        draw: a sample's grid (h, w), by a random generator.
        length: tokens to which a batch is padded; 0: as many as its longest image has.
    """

    name: str
    draw: Draw
    length: int = 0

    def grids(self, batch: int) -> list[Grid]:
        """The grids of a batch, always the same ones; a smaller batch begins a larger one."""
        source = random.Random(f"{self.name} 0")
        return [self.draw(source) for _ in range(batch)]


def fit(height: float, width: float, tokens: int, patch: int = 16) -> Grid:
    """The grid (h, w) of an image, in pixels, in at most ``tokens`` patches, as timm resizes it."""
    from timm.data.naflex_transforms import get_image_size_for_seq

    # timm's own search, so that the grids are those that its loader would make.
    _, (h, w) = get_image_size_for_seq((height, width), patch, tokens)
    return h // patch, w // patch


def fit_aspect(aspect: float, tokens: int) -> Grid:
    """The grid of a large image whose width is ``aspect`` times its height."""
    return fit(math.sqrt(DRAWN_IMAGE / aspect), math.sqrt(DRAWN_IMAGE * aspect), tokens)


def coordinates(grids: list[Grid], length: int = 0) -> Any:
    """Coordinates of the tokens as timm's collator makes them: row-major, then (0, 0).

    Args:
        grids: of the B samples.
        length: N; the most tokens of a sample if it is 0.

    Returns:
        (B, N, 2), each (y, x), int64.
    """
    import torch

    tokens = [h * w for h, w in grids]
    coord = torch.zeros(len(grids), max(length, *tokens), 2, dtype=torch.long)  # (B, N, 2)
    # What is left of a sample is padding, which keeps (0, 0).
    for sample, (h, w) in zip(coord, grids):
        sample[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return coord


def siglip_grids(tokens: int) -> Draw:
    """Aspect ratios from 1:3 to 3:1, even in the logarithm, as large as fits ``tokens``."""
    return lambda source: fit_aspect(3 ** source.uniform(-1, 1), tokens)


def siglip_workload(tokens: int) -> Workload:
    """Batches of such grids, padded to ``tokens``."""
    return Workload(f"siglip-{tokens}", siglip_grids(tokens), tokens)
