"""Images as the model saw them, each with a map of drift over its patches per contender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHOWN = ("grid_sample", "issue-2514-zeros")  # the contenders whose maps are kept; maps of exact ones are empty


@dataclass(frozen=True)
class Picture:
    """One image and its maps.

    Attributes:
        name: the file's, or its number.
        pixels: (height, width, 3), or (height, width) of a gray image; contrast stretched to 0...1.
        maps: per contender (h, w): the length of the token's difference over the RMS length of timm's tokens.
    """

    name: str
    pixels: Tensor
    maps: dict[str, Tensor]


def picture(name: str, batch: dict[str, Tensor], maps: dict[str, Tensor], sample: int, embeds: Any) -> Picture:
    """Put the patches of one sample together again, and its numbers in the contenders' maps (B, N) onto the grid."""
    valid = batch["patch_valid"][sample]
    y, x = batch["patch_coord"][sample][valid].long().cpu().unbind(-1)

    def arranged(values: Tensor) -> Tensor:
        cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[2:])
        cells[y, x] = values[sample][valid].float().cpu()
        return cells

    patches, size, channels = arranged(batch["patches"]), embeds.patch_size, embeds.in_chans
    if getattr(embeds, "channels_last", True):
        patches = patches.unflatten(2, (*size, channels))
    else:
        patches = patches.unflatten(2, (channels, *size)).movedim(2, -1)
    pixels = patches.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # (height, width, C)
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6)
    shown = pixels[..., :3] if channels >= 3 else pixels[..., 0]
    return Picture(name, shown, {key: arranged(values) for key, values in maps.items()})
