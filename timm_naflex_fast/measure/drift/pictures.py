"""Images that show the drift, as the model saw them, each with a map over its patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Picture:
    """One image and its map.

    Attributes:
        name: the file's, or its number, and why it was chosen.
        contender: whose drift it shows.
        pixels: (height, width, 3); contrast stretched to 0...1.
        map: (h, w): the length of each token's difference over the RMS length of timm's tokens.
    """

    name: str
    contender: str
    pixels: Tensor
    map: Tensor


def choose(shares: Sequence[float]) -> dict[int, str]:
    """The images to show, by the drift of each as a share of its embeddings; why each.

    One that hardly differs is not shown: its map would be empty.
    """
    order = sorted(range(len(shares)), key=shares.__getitem__)
    worst = order[-1]
    # The worst itself is among them, also where no image differs.
    differing = [image for image in order if shares[image] >= 1e-2 * shares[worst]]
    median = differing[(len(differing) - 1) // 2]
    reasons = {worst: f"the worst of {len(order)} images"}
    reasons.setdefault(median, "the median")
    return reasons


def arranged(values: Tensor, image: dict[str, Tensor]) -> Tensor:
    """Values (1, N, ...) of the tokens of a batch of one image, on its grid: (h, w, ...)."""
    valid = image["patch_valid"][0]
    y, x = image["patch_coord"][0][valid].long().unbind(-1)
    cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[2:])
    cells[y, x] = values[0][valid].float()
    return cells


def pixels_of(image: dict[str, Tensor], embeds: Any) -> Tensor:
    """The image made of its patches again: (height, width, 3), contrast stretched to 0...1.

    Args:
        image: a batch of this one image.
        embeds: the model's NaFlexEmbeds.
    """
    height, width = embeds.patch_size
    patches = arranged(image["patches"], image)
    patches = patches.unflatten(2, (height, width, embeds.in_chans))
    rows = patches.transpose(1, 2)  # (h, height, w, width, C)
    pixels = rows.flatten(2, 3).flatten(0, 1)  # (h * height, w * width, C)
    darkest = pixels.min()
    pixels = (pixels - darkest) / (pixels.max() - darkest).clamp(min=1e-6)
    return pixels.expand(-1, -1, 3)
