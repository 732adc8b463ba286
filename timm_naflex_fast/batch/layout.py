"""Where the tokens of a batch lie, if no coordinates (B, N, 2) tell: by one grid, or by the sizes
of the images.

``plan`` is for who may read the grids on the host; ``coordinates`` is for graphs, which read
nothing. (A graph takes the one grid of plain images as it is.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling.matrices import ResizeSpec
from . import grids
from .grids import GridGroup, ResamplePlan


class OneGrid(NamedTuple):
    """The grid of every sample of a batch of plain images, whose tokens are in row-major order."""

    h: int
    w: int

    def plan(self, x: Tensor, spec: ResizeSpec) -> ResamplePlan:
        """One group. ``x`` (B, h*w, C) has one token for each cell, see ``check_length``."""
        batch, length = x.shape[:2]
        group = GridGroup(int(self.h), int(self.w), list(range(batch)))
        return ResamplePlan([group], [(length, 0)] * batch, spec, x.dtype)


class Sizes(NamedTuple):
    """The size of each image, (B, 2) as (h, w) or (B, 3) as (t, h, w): a tensor or a sequence.

    ``merge``: cells in merge x merge blocks. ``columns``: 2 where there are no frames. ``length``:
    each image has so many tokens; None: as many as it has cells, one image after the other.
    ``embeds_padding``: those after an image get its first cell.
    """

    values: Any
    columns: tuple[int, ...] = (2, 3)
    merge: int = 1
    length: int | None = None
    embeds_padding: bool = False

    def plan(self, x: Tensor, spec: ResizeSpec) -> ResamplePlan:
        """Errors: see ``sizes_on_host`` and ``group_sizes``. ``x``: tokens (B, N, C), or a table of
        their dtype."""
        listed = grids.sizes_on_host(
            self.values, self.columns, batch=None if 3 in self.columns else len(x)
        )
        return ResamplePlan(*self.group(listed), spec, x.dtype)

    def group(self, listed: grids.FrameSizes) -> tuple[list[grids.GridGroup], grids.TokenCounts]:
        """The groups of these sizes, which are on the host."""
        return grids.group_sizes(
            listed, merge=self.merge, length=self.length, embeds_padding=self.embeds_padding
        )

    def on_device(self, like: Tensor, length: int) -> Tensor:
        """Sizes (B, 2) or (B, 3), int64, beside ``like``. Their shape is checked now; the values
        when the graph runs.

        Those that are on the host are checked now.
        """
        sizes = self.values
        if not isinstance(sizes, Tensor):
            listed = grids.sizes_on_host(sizes, self.columns)
            self.group(listed)
            return torch.tensor(listed, device=like.device).view(-1, 3)
        whole = not (sizes.is_floating_point() or sizes.dtype is torch.bool)
        if not whole or sizes.ndim != 2 or sizes.shape[1] not in self.columns:
            raise grids.bad_sizes(f"{sizes.dtype} {tuple(sizes.shape)}", self.columns)
        sizes = sizes.to(like.device, torch.int64)
        fits = (
            (sizes > 0).all()
            & (sizes[:, -2:] % self.merge == 0).all()
            & (sizes.prod(1) <= length).all()
        )
        # No number in the message: to write ``length`` into it would fix it, one graph for each
        # length.
        torch._assert_async(
            fits,
            "grid_sizes must be at least 1, multiples of merge, and of at most ``length`` tokens",
        )
        return sizes

    def coordinates(self, x: Tensor) -> Tensor:
        """Coordinates (B, N, 2) of the first frames for tokens ``x`` (B, N, C); those after them
        carry (0, 0)."""
        sizes = self.on_device(x, x.shape[1])
        grids.check_count(len(sizes), len(x))
        return row_major(sizes, x.shape[1])


TokenLayout = Tensor | OneGrid | Sizes
"""A tensor holds coordinates (B, N, 2)."""
OnInvalid = Callable[[], None] | None
"""What is called in place of an ``InvalidCoordinateError``, if not None."""


def row_major(sizes: Tensor, length: int, merge: int = 1) -> Tensor:
    """Coordinates (B, length, 2) from sizes (B, 2) or (B, 3); tokens after the first frame carry
    (0, 0)."""
    h, w = sizes[:, -2:, None].unbind(1)
    cell = torch.arange(length, device=sizes.device)[None]
    blocks = w // merge
    block, inner = cell // (merge * merge), cell % (merge * merge)
    y, x = block // blocks * merge + inner // merge, block % blocks * merge + inner % merge
    return torch.stack((y, x), -1) * (cell < h * w)[..., None]
