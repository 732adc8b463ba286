"""Images as the model saw them, each with a map of drift over its patches per contender."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIDE = 192  # pixels along the longer side of a kept image
SHOWN = ("grid_sample", "issue-2514-zeros")  # the contenders whose maps are kept; maps of exact ones are empty


@dataclass(frozen=True)
class Picture:
    """One image and its maps.

    Attributes:
        name: the file's, or its number.
        grid: patches along height and width.
        jpeg: the image, contrast stretched, as base64 text.
        maps: per contender h rows of w numbers: the length of the token's difference over the RMS length of tokens.
    """

    name: str
    grid: tuple[int, int]
    jpeg: str
    maps: dict[str, list[list[float]]]


def wanted(kept: list[tuple[int, int]], sizes: list[tuple[int, int]], limit: int) -> list[int]:
    """Which images of a batch to keep, ``limit`` at most with those ``kept``: one per aspect ratio, to a fifth."""
    aspects = {_aspect(grid) for grid in kept}
    chosen = []
    for i, grid in enumerate(sizes):
        if len(aspects) < limit and _aspect(grid) not in aspects:
            aspects.add(_aspect(grid))
            chosen.append(i)
    return chosen


def _aspect(grid: tuple[int, int]) -> int:
    return round(math.log(grid[1] / grid[0], 1.2))


def picture(name: str, inputs: dict[str, Tensor], sample: int, maps: dict[str, Tensor], embeds: Any) -> Picture:
    """Put the patches of one sample together again, and each contender's numbers (N,) onto the grid."""
    valid = inputs["patch_valid"][sample]
    y, x = inputs["patch_coord"][sample][valid].long().cpu().unbind(-1)

    def arranged(values: Tensor) -> Tensor:
        cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[1:])
        cells[y, x] = values[valid].float().cpu()
        return cells

    found = {
        key: [[float(f"{value:.3g}") for value in row] for row in arranged(maps[key]).tolist()]
        for key in SHOWN
        if key in maps
    }
    patches = arranged(inputs["patches"][sample])
    return Picture(name, (patches.shape[0], patches.shape[1]), _jpeg(patches, embeds), found)


def _jpeg(patches: Tensor, embeds: Any) -> str:
    """The image of the patches (h, w, P*P*C)."""
    from PIL import Image

    (height, width), channels = embeds.patch_size, embeds.in_chans
    if getattr(embeds, "channels_last", True):
        patches = patches.unflatten(2, (height, width, channels))
    else:
        patches = patches.unflatten(2, (channels, height, width)).permute(0, 1, 3, 4, 2)
    pixels = patches.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # (image height, width, C)
    low, high = pixels.min(), pixels.max()
    pixels = ((pixels - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8)
    image = Image.fromarray(pixels[..., :3].numpy() if channels >= 3 else pixels[..., 0].numpy())
    scale = SIDE / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=70)
    return base64.b64encode(file.getvalue()).decode("ascii")
