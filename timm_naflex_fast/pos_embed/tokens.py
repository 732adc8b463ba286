"""The tokens of a batch: which cell each takes, and the sums over them.

Coordinates are copied to the host here alone. What is read of them are the runs: for each
distinct grid, which tokens take its cells. Two functions use it, each the transpose of the
other: ``add_to_tokens`` and ``sum_over_tokens``.

Tests: tests/pos_embed/test_tokens.py, tests/contract/test_backends.py.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .sums import BlockSum
from .table import ResizeSpec, Size

MAX_SAVED = 4096  # tokens of an image: up to here its coordinates are told at once

Coordinates = Tensor | Size
"""Where the tokens of a batch lie: (y, x) of each, (B, N, 2), in any number dtype; or of plain images,
whose tokens are in row-major order, their one grid (h, w)."""

MAX_COORDINATE = 2**31 - 1  # the cells of a grid can still be counted in int64


class Run(NamedTuple):
    """Tokens that stand side by side and take cells of one grid.

    They are ``x[samples, tokens]`` of a batch (B, N, C): more than one sample where all have the
    same grid in the same order.
    """

    samples: slice
    tokens: slice
    cells: int | Tensor
    """Each token takes one of the first so many cells, in row-major order; with 1, all take the
    first cell. Or the number of each token's cell (tokens,)."""


Runs = dict[Size, list[Run]]  # of each distinct grid (h, w), by first appearance


def check_tokens(x: Tensor, channels: int, patch_coord: Coordinates | None = None) -> None:
    """``x`` must be (B, N, channels), and ``patch_coord``, if it is a tensor, (B, N, 2)."""
    shape = x.shape
    if len(shape) != 3 or shape[2] != channels:
        raise ValueError(
            f"x must be tokens of shape (B, N, {channels}), as wide as the table; "
            f"got {tuple(shape)}"
        )
    if not isinstance(patch_coord, Tensor):
        return
    valid = (shape[0], shape[1], 2)
    if patch_coord.shape != valid:
        raise ValueError(
            f"patch_coord must hold (y, x) for each token, shape {valid} for the shape of x; "
            f"got {tuple(patch_coord.shape)}"
        )


def most_cells(tokens: Any) -> Any:
    """The most cells that a sample's grid may have, by its number of tokens: an int, or symbolic.

    A wrong coordinate must not take memory out of proportion. Masked models keep one token in four
    or more; 64 times leaves room for any that drops tokens, and 4,096 cells for an image that kept
    a few.
    """
    return 64 * tokens + 4096


def runs_of(patch_coord: Coordinates, x: Tensor, spec: ResizeSpec) -> Runs | None:
    """The grids of a batch, as timm reads them: largest coordinate + 1 on each axis.

    By NumPy: on so few numbers its operations cost a third of PyTorch's.

    Args:
        patch_coord: where the tokens lie.
        x: (B, N, C) tokens, whose numbers are not used. The runs name cells on their device.
        spec: whether padding tokens get the cell that they name, (0, 0) or another; and whether the
            table is sampled, which it can be at any coordinate.

    Returns:
        No grid when the batch holds no token. Padding tokens, those from the h*w-th on, are not
        looked at, except where they get embeddings too. None where the table is sampled and a
        coordinate names no cell, or one of a grid of more than 64 N + 4,096 cells.

    Raises:
        ValueError: a negative or non-finite coordinate among the tokens that get embeddings, or a
            grid of more than 64 N + 4,096 cells, where the table is not sampled.
    """
    batch, length, _ = x.shape
    if not isinstance(patch_coord, Tensor):
        h, w = patch_coord
        # Where the tokens are not h*w, PyTorch says so when it adds.
        return {(h, w): [Run(slice(0, batch), slice(0, length), h * w)]}
    if x.numel() == 0:
        return {}
    # The one copy from the device in a call: what follows is known on the host.
    on_host = patch_coord.cpu()
    whole = on_host
    if on_host.dtype is not torch.int64:
        whole = whole_numbers(on_host)
        if spec.samples and not torch.equal(whole.to(on_host.dtype), on_host):
            return None
    coord: Any = whole.numpy()
    return _runs_of_one_grid(coord, spec) or _runs(coord, x.device, spec)


def whole_numbers(patch_coord: Tensor) -> Tensor:
    """Coordinates as int64. Floats are first cut to -1 ... 2**31, and NaN to -1.

    To cast others is undefined.
    """
    if patch_coord.is_floating_point():
        coord = patch_coord.detach()
        if coord.dtype is not torch.float64:
            coord = coord.to(torch.float32)  # half precision cannot hold the bounds
        patch_coord = coord.clamp(-1, MAX_COORDINATE).nan_to_num(nan=-1)
    return patch_coord.to(torch.int64)


def grid_sizes_from_coord(patch_coord: Tensor) -> Tensor:
    """The grid of each sample, (B, 2) as (h, w): the largest coordinate on each axis + 1.

    For graphs: on the host ``runs_of`` tells. One maximum for each axis: OpenVINO 2026.4 computes
    one over both wrong.
    """
    y, x = patch_coord[..., 0], patch_coord[..., 1]  # (B, N)
    return torch.stack((y.amax(1), x.amax(1)), 1) + 1


def token_counts(sizes: Tensor) -> Tensor:
    """How many tokens each image has, (B, 1), by sizes (B, 2) or (B, 3).

    Axis after axis: Core ML knows no product of all numbers of a row.
    """
    count = sizes[:, :1]  # (B, 1)
    for axis in range(1, sizes.shape[1]):
        count = count * sizes[:, axis, None]
    return count


def tokens_of_images(sizes: Tensor, length: int) -> Tensor:
    """Which of so many tokens belong to the images, (B, length), by sizes (B, 2) or (B, 3)."""
    return torch.arange(length, device=sizes.device) < token_counts(sizes)


def _runs_of_one_grid(coord: Any, spec: ResizeSpec) -> Runs | None:
    """The runs of images of one size in row-major order, which are most cheaply told; None of others.

    Told by how they stand in memory, 16 bytes for each token. Where the table's numbers have just
    gone through the caches, the first operation of NumPy's takes 10 us.
    """
    batch, length, _ = coord.shape
    first = coord[0].tobytes()
    # The last token before the zeros of padding names the last cell.
    count = max(math.ceil(len(first.rstrip(b"\0")) / 16), 1)
    y, x = coord[0, count - 1].tolist()
    if x < 0 or (y + 1) * (x + 1) != count or count > MAX_SAVED:
        return None
    in_order = _row_major(x + 1)[: 16 * count].ljust(16 * length, b"\0")
    for image in coord:
        if image.tobytes() != in_order:
            return None
    return {(y + 1, x + 1): _runs_in_order(slice(0, batch), length, count, spec)}


@lru_cache(maxsize=64)
def _row_major(w: int) -> bytes:
    """The coordinates of a grid of this width, of any height, as they stand in memory: 64 KiB."""
    return np.stack(np.divmod(np.arange(MAX_SAVED), w), 1).tobytes()


def _runs_in_order(samples: slice, length: int, cells: int, spec: ResizeSpec) -> list[Run]:
    """The runs of images with so many cells, whose tokens stand in row-major order."""
    count = min(length, cells)
    runs = [Run(samples, slice(0, count), count)]
    if spec.embeds_padding and count < length:
        runs.append(Run(samples, slice(count, length), 1))
    return runs


def _runs(coord: Any, device: torch.device, spec: ResizeSpec) -> Runs | None:
    """The runs of any batch, from all its coordinates; see :func:`runs_of`."""
    _, length, _ = coord.shape
    # All y, then all x, (2, B, N): NumPy is slow on every other number.
    axes = coord.transpose(2, 0, 1).copy()
    # Cut, so that the cells can be counted.
    heights, widths = axes.max(2).clip(-1, MAX_COORDINATE) + 1  # (B,) each
    cells = heights * widths
    order = np.arange(length)
    in_grid = order < cells[:, None]  # (B, N)
    embedded = in_grid | spec.embeds_padding

    # The tokens that are embedded must name cells, and no grid may have none, or too many.
    most = most_cells(length)
    names_none = (axes < 0).any(0) & embedded  # (B, N)
    wrong = names_none.any(1) | (cells < 1) | (cells > most)
    if wrong.any():
        if spec.samples:
            return None
        sample = wrong.argmax()
        raise ValueError(
            f"patch_coord of sample {sample} holds a negative or non-finite coordinate, or a grid "
            f"of more than 64 x {length} + 4096 = {most} cells: {heights[sample]} x "
            f"{widths[sample]}; coordinates count from 0, and padding tokens carry (0, 0)"
        )

    # A token stands in order if it names the cell of its number. Padding names the cell (0, 0),
    # and counts where it is embedded.
    cell = axes[0] * widths[:, None] + axes[1]  # (B, N)
    elsewhere = (cell != order * in_grid) & embedded
    reordered = elsewhere.any(1).tolist()
    cell_of_token: Sequence[Tensor] = ()
    if any(reordered):
        cell_of_token = torch.from_numpy(cell).to(device, non_blocking=True).unbind()

    # Samples of one grid share its embeddings, and their gradients are summed before the table's.
    runs: Runs = {}
    for sample, size in enumerate(zip(heights.tolist(), widths.tolist())):
        samples = slice(sample, sample + 1)
        of_size = runs.setdefault(size, [])
        if not reordered[sample]:
            of_size += _runs_in_order(samples, length, size[0] * size[1], spec)
            continue
        count = length if spec.embeds_padding else min(length, size[0] * size[1])
        taken = cell_of_token[sample]
        if count < length:  # to slice each one would cost time, where most need no slice
            taken = taken[:count]
        of_size.append(Run(samples, slice(0, count), taken))
    return runs


def add_to_tokens(x: Tensor, runs: Iterable[Run], embeddings: Tensor) -> None:
    """Add a grid's embeddings (h*w, C) to the tokens of its runs, ``x`` (B, N, C), in place."""
    embeddings = embeddings.to(x.dtype)
    cells: int | Tensor | None = None
    for run in runs:
        if run.cells is not cells:  # runs may share them
            cells = run.cells
            if isinstance(cells, Tensor):
                rows = embeddings.index_select(0, cells)
            elif cells < embeddings.shape[0]:
                rows = embeddings[:cells]
            else:
                rows = embeddings
        # A view of x, so this writes into x itself.
        x[run.samples, run.tokens].add_(rows)


def sum_over_tokens(g: Tensor, runs: Sequence[Run], size: Size, dtype: torch.dtype) -> Tensor:
    """The transpose of ``add_to_tokens``: the sum (h*w, C) over a grid's runs, in ``dtype``.

    ``g`` (B, N, C): the gradient of the tokens. The sum may be a view of it.
    """
    h, w = size
    total = BlockSum(h * w, dtype)
    for run in runs:
        # One slice after the other. Where two slices in one index take everything, PyTorch calls
        # ``alias``, which refuses batches of gradients.
        part = g[run.samples].transpose(0, 1)[run.tokens]  # (tokens, samples, C)
        part = part[:, 0] if part.shape[1] == 1 else part.sum(1, dtype=dtype)  # (tokens, C)
        if isinstance(run.cells, Tensor):
            total.add(part, run.cells)
            continue
        if run.cells < len(part):  # all take the first cell
            part = part.sum(0, keepdim=True, dtype=dtype)
        if run.cells == h * w and len(runs) == 1:
            return part.to(dtype).contiguous()
        total.add(part)
    return total.total()
