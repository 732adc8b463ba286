"""Images as the model saw them, each with a map of drift over its patches per contender."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIDE = 256  # pixels along the longer side of a kept image
FIRST = ("matmul", "grid_sample", "issue-2514-zeros")  # whose maps are kept, where they were measured


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


def picture(name: str, inputs: dict[str, Tensor], sample: int, maps: dict[str, Tensor], model: Any) -> Picture:
    """Put the patches of one sample together again, and each contender's numbers (N,) onto the grid."""
    valid = inputs["patch_valid"][sample]
    y, x = inputs["patch_coord"][sample][valid].long().cpu().unbind(-1)
    h, w = int(y.max()) + 1, int(x.max()) + 1
    found = {}
    for key in [n for n in FIRST if n in maps] or list(maps)[1:4]:
        grid = torch.zeros(h, w)
        grid[y, x] = maps[key][valid].float().cpu()
        found[key] = [[float(f"{value:.3g}") for value in row] for row in grid.tolist()]
    return Picture(name, (h, w), _jpeg(inputs["patches"][sample][valid].float().cpu(), y, x, model.embeds), found)


def _jpeg(patches: Tensor, y: Tensor, x: Tensor, embeds: Any) -> str:
    """The image of the patches (N, P*P*C) or (N, P, P, C) at (y, x)."""
    from PIL import Image

    channels, last = embeds.in_chans, getattr(embeds, "channels_last", True)
    if patches.ndim == 2:  # flat, of the model's own patch size
        height, width = embeds.patch_size
        patches = patches.reshape(-1, *((height, width, channels) if last else (channels, height, width)))
    if not last:
        patches = patches.permute(0, 2, 3, 1)
    cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *patches.shape[1:])
    cells[y, x] = patches
    pixels = cells.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)  # (height, width, C)
    low, high = pixels.min(), pixels.max()
    pixels = ((pixels - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8)
    image = Image.fromarray(pixels[..., :3].numpy() if channels >= 3 else pixels[..., 0].numpy())
    scale = SIDE / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return base64.b64encode(file.getvalue()).decode("ascii")
