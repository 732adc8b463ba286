"""Which images show the drift, and each of them as the model saw it, with maps over its patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Picture:
    """One image and its maps.

    Attributes:
        name: the file's, or its number, and why it was chosen.
        pixels: (height, width, 3), or (height, width) of a gray image; contrast stretched to 0...1.
        maps: per contender (h, w): the length of the token's difference over the RMS length of
            timm's tokens.
    """

    name: str
    pixels: Tensor
    maps: dict[str, Tensor]


def choose(shares: Sequence[float], shrinks: Sequence[float]) -> dict[int, str]:
    """The images to show: the worst, the median, and where the table shrinks most; why each.

    One that hardly differs is not shown: its map would be empty.

    Args:
        shares: drift of each image, as a share of its embeddings.
        shrinks: table cells per patch, of each image.
    """
    order = sorted(range(len(shares)), key=shares.__getitem__)
    worst = order[-1]
    # The worst itself is among them, also where no image differs.
    differing = [image for image in order if shares[image] >= 1e-2 * shares[worst]]
    median = differing[(len(differing) - 1) // 2]
    most = max(differing, key=shrinks.__getitem__)
    reasons = {worst: f"the worst of {len(order)} images"}
    reasons.setdefault(median, "the median")
    if shrinks[most] > 1:
        reasons.setdefault(most, f"the table shrinks most ({shrinks[most]:.1f} cells per patch)")
    return reasons


def picture(name: str, image: dict[str, Tensor], maps: dict[str, Tensor], embeds: Any) -> Picture:
    """An image made of its patches again, and its numbers arranged on the grid.

    Args:
        name: of the picture.
        image: a batch of this one image.
        maps: (1, N) numbers of its tokens, per contender.
        embeds: the model's NaFlexEmbeds, which knows how a patch lies in a token.
    """
    patches = _arranged(image["patches"], image)
    channels = embeds.in_chans
    height, width = embeds.patch_size
    if getattr(embeds, "channels_last", True):
        patches = patches.unflatten(2, (height, width, channels))
    else:
        patches = patches.unflatten(2, (channels, height, width)).movedim(2, -1)

    rows = patches.transpose(1, 2)  # (h, height, w, width, C)
    pixels = rows.flatten(2, 3).flatten(0, 1)  # (h * height, w * width, C)
    darkest = pixels.min()
    pixels = (pixels - darkest) / (pixels.max() - darkest).clamp(min=1e-6)
    arranged = {key: _arranged(values, image) for key, values in maps.items()}
    return Picture(name, pixels.squeeze(-1), arranged)


def _arranged(values: Tensor, image: dict[str, Tensor]) -> Tensor:
    """Values (1, N, ...) of an image's tokens on its grid: (h, w, ...)."""
    valid = image["patch_valid"][0]
    y, x = image["patch_coord"][0][valid].long().unbind(-1)
    cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[2:])
    cells[y, x] = values[0][valid].float()
    return cells
