"""Images that show the drift, as the model saw them, each with a map over its patches.

Tests: tests/measure/drift/test_survey.py.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Picture:
    """One image and its map.

    Attributes:
        name: the file's, or its number, and why it was chosen.
        contender: whose drift it shows.
        pixels: (height, width, 3); contrast stretched to 0...1.
        map: (h, w): the length of each token's difference over that of timm's token.
    """

    name: str
    contender: str
    pixels: Tensor
    map: Tensor


def choose(shares: Tensor) -> dict[int, str]:
    """The images to show, by the drift of each (N,) as a share of its embeddings; why each."""
    order = shares.argsort().tolist()
    median = order[(len(order) - 1) // 2]
    # Where both are the same image, it is the worst.
    return {median: "the median", order[-1]: f"the worst of {len(order)} images"}


def on_grid(values: Tensor, grid: list[int]) -> Tensor:
    """Values (1, N, ...) of the tokens of one image, row by row, then padding: (h, w, ...)."""
    return values[0, : math.prod(grid)].unflatten(0, grid).float()


def pixels_of(patches: Tensor, embeds: Any) -> Tensor:
    """The image made of its patches again: (height, width, 3), contrast stretched to 0...1.

    Args:
        patches: (h, w, patch height * patch width * channels).
        embeds: the model's NaFlexEmbeds.
    """
    if getattr(embeds, "channels_last", True):  # older releases of timm know no other order
        parts = patches.unflatten(2, (*embeds.patch_size, embeds.in_chans))
    else:
        parts = patches.unflatten(2, (embeds.in_chans, *embeds.patch_size)).movedim(2, -1)
    rows = parts.transpose(1, 2)  # (h, height, w, width, C)
    pixels = rows.flatten(2, 3).flatten(0, 1)  # (h * height, w * width, C)
    pixels = pixels - pixels.min()
    return (pixels / pixels.max().clamp(min=1e-6)).expand(-1, -1, 3)
