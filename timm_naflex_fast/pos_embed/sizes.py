"""Sizes of images, as other libraries give them, and the coordinates of their tokens."""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tracing import watcher
from .checks import check_numbers
from .kept import kept_by_arguments
from .tokens import Coordinates, Run, Runs, token_counts, tokens_of_images


def coordinates_in_graph(patch_coord: Coordinates, x: Tensor) -> Tensor:
    """The coordinates (B, N, 2) of tokens ``x`` (B, N, C), or (1, N, 2) for all samples."""
    if isinstance(patch_coord, Tensor):
        return patch_coord
    h, w = patch_coord
    cell = torch.arange(h * w, device=x.device)
    return torch.stack((cell // w, cell % w), -1)[None]


class Sizes(NamedTuple):
    """The size of each image, (B, 2) as (h, w) or (B, 3) as (t, h, w): a tensor or a sequence.

    ``merge``: cells in merge x merge blocks. ``length``: each image has so many tokens; None: as
    many as it has cells, one image after the other. ``padding``: what those after an image get,
    ``"zeros"`` or its ``"first"`` cell.
    """

    values: Any
    merge: int = 1
    length: int | None = None
    padding: str = "zeros"

    def runs(self, device: torch.device) -> tuple[int, Runs]:
        """How many tokens T all images have, and their runs as one sample (1, T, C).

        Raises:
            ValueError: those of ``on_host``.
        """
        runs: Runs = {}
        row = slice(0, 1)
        end = 0
        for t, h, w in self.on_host():
            of_size = runs.setdefault((h, w), [])
            cells = h * w if self.merge == 1 else _block_order(h, w, self.merge, device)
            first = end
            for _ in range(t):
                of_size.append(Run(row, slice(end, end + h * w), cells))
                end += h * w
            # An image's padding comes after its last frame.
            if self.length is not None:
                padding = slice(end, first + self.length)
                if self.padding == "first":
                    of_size.append(Run(row, padding, 1))
                end = padding.stop
        return end, runs

    def on_host(self) -> list[tuple[int, int, int]]:
        """The sizes, as (t, h, w): t frames of h x w cells. A tensor is read from its device.

        Raises:
            ValueError: other shapes or dtypes, a size below 1; ``merge`` does not divide a size;
                ``length`` is less than the tokens of an image.
        """
        listed = self.values
        if isinstance(listed, Tensor):
            check_numbers(listed, "grid_sizes")
            listed = listed.tolist()  # one copy from a device, not one for each number
        try:
            return [self._checked(size) for size in listed]
        except (TypeError, ValueError):
            raise ValueError(
                "grid_sizes must hold (h, w) or (t, h, w) for each image, shape (B, 2) or (B, 3), "
                f"integers of at least 1, h and w multiples of merge={self.merge}, with at most "
                f"length={self.length} tokens; got {listed}"
            ) from None

    def _checked(self, size: Any) -> tuple[int, int, int]:
        """One size, as (t, h, w). A wrong one is a TypeError or a ValueError without words."""
        *frames, h, w = map(operator.index, size)
        (t,) = frames or (1,)
        is_merged = h % self.merge == w % self.merge == 0
        is_short = self.length is None or t * h * w <= self.length
        if min(t, h, w) < 1 or not is_merged or not is_short:
            raise ValueError
        return t, h, w

    def as_tensor(self, length: int) -> Tensor:
        """Sizes (B, 2) or (B, 3), int64, on the device on which they are given.

        The values are checked now; those of a tensor in a graph when it runs.
        """
        sizes = self.values
        if not isinstance(sizes, Tensor) or watcher() != "tracer":
            return torch.tensor(self.on_host(), device="cpu").view(-1, 3)
        # What a graph cannot read it checks when it runs.
        sizes = sizes.to(torch.int64)
        is_positive = (sizes > 0).all()
        is_merged = (sizes[:, -2:] % self.merge == 0).all()
        is_short = (token_counts(sizes) <= length).all()
        # No number in the message: to write ``length`` into it would fix it, one graph for each
        # length.
        torch._assert_async(
            is_positive & is_merged & is_short,
            "grid_sizes must be at least 1, multiples of merge, and of at most ``length`` tokens",
        )
        return sizes


def coordinates_of(grid_sizes: Any, x: Tensor) -> Tensor:
    """Coordinates (B, N, 2) for tokens ``x`` (B, N, C) from sizes (B, 2).

    Tokens after an image carry (0, 0).

    Raises:
        ValueError: not one size (h, w) for each sample, or those of ``Sizes.on_host``.
    """
    batch, length, _ = x.shape
    shape = torch.as_tensor(grid_sizes).shape
    if shape != (batch, 2):
        raise ValueError(
            f"grid_sizes must hold (h, w) for each of the {batch} samples, shape ({batch}, 2); "
            f"got shape {tuple(shape)}"
        )
    sizes = Sizes(grid_sizes, length=length).as_tensor(length)
    return row_major(sizes, length)


def row_major(sizes: Tensor, length: int, merge: int = 1) -> Tensor:
    """Coordinates (B, length, 2) from sizes (B, 2) or (B, 3), in merge x merge blocks.

    Each frame has the same. Tokens after an image carry (0, 0).
    """
    h, w = sizes[:, -2:].split(1, 1)  # (B, 1)
    token = torch.arange(length, device=sizes.device)  # (length,)
    cell = token % (h * w)  # (B, length)
    # Token n lies in block n // merge**2, and blocks stand in row-major order too.
    block = cell // (merge * merge)
    inner = cell % (merge * merge)
    blocks = w // merge
    y = block // blocks * merge + inner // merge
    x = block % blocks * merge + inner % merge
    return torch.stack((y, x), -1) * tokens_of_images(sizes, length)[..., None]


@kept_by_arguments
def _block_order(h: int, w: int, merge: int, device: torch.device) -> Tensor:
    """The cells of a grid in the order of its merge x merge blocks, (h*w,).

    >>> _block_order(2, 4, 2, torch.device("cpu"))
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    cells = torch.arange(h * w, device=device)
    return cells.view(h // merge, merge, w // merge, merge).transpose(1, 2).flatten()
