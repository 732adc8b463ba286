"""Which images show the drift, and each of them as the model saw it, with a map of drift over its
patches."""

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
    """The images to show, each with the reason: the worst, the median, and the one for which the
    table shrinks most.

    One that hardly differs is not shown: its map would be empty.

    Args:
        shares: drift of each image, as a share of its embeddings.
        shrinks: table cells per patch, of each image.
    """
    order = sorted(range(len(shares)), key=shares.__getitem__)
    reasons = {order[-1]: f"the worst of {len(order)} images"}
    order = [image for image in order if shares[image] > 1e-2 * shares[order[-1]]] or order[-1:]
    reasons.setdefault(order[(len(order) - 1) // 2], "the median")
    most = max(order, key=shrinks.__getitem__)
    if shrinks[most] > 1:
        reasons.setdefault(most, f"the table shrinks most ({shrinks[most]:.1f} cells per patch)")
    return reasons


def picture(name: str, batch: dict[str, Tensor], maps: dict[str, Tensor], embeds: Any) -> Picture:
    """Put the patches of a batch's one image together again, and its numbers in the maps (1, N)
    onto the grid."""
    valid = batch["patch_valid"][0]
    y, x = batch["patch_coord"][0][valid].long().unbind(-1)

    def arranged(values: Tensor) -> Tensor:
        cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[2:])
        cells[y, x] = values[0][valid].float()
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
