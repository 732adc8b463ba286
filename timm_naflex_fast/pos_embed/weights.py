"""One-dimensional resize matrices, read off PyTorch's own resampling.

Resampling a table P (H0, W0, C) to a grid (h, w) is linear and separable::

    embedding(h, w) = A_h . P . A_w^T

where ``A_n`` is the (n, N0) matrix that resizes one axis from N0 cells to n. To resize a unit
vector is to read a column of ``A_n``. So we resize all of them, an identity matrix, and get
PyTorch's own weights with PyTorch's own rounding. The weights are a triangle (bilinear), or the
cubic kernel of Keys (1981, "Cubic convolution interpolation for digital image processing"):

- antialiased, with the coefficient -0.5; taps outside the table are dropped, and the rest
  renormalised;
- otherwise with -0.75; taps outside move to the border.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .formula import tap_weights
from .kept import kept_by_arguments
from .table import ResizeSpec, Size


def interpolate(table: Tensor, lengths: tuple[int, ...], spec: ResizeSpec) -> Tensor:
    """A table ([1,] H0, W0, C) or ([1,] N0, C), resized by ``F.interpolate``: (1, *lengths, C)."""
    # timm hands over its tables (1, H0, W0, C) in whatever layout they have. Which of its kernels
    # PyTorch takes, and so the last bits, depends on that.
    if table.ndim != 4 or table.is_contiguous():
        # Other tables cell after cell: resized with antialiasing to a width of 1, every other
        # layout gives wrong numbers (PyTorch 2.4 to 2.15). The view gives axes of length 1 the
        # usual strides, which PyTorch asks for too: NumPy's new axes have stride 0.
        shape = table.shape[-1 - len(lengths) :]
        table = table.contiguous().view(1, *shape)
    resized = F.interpolate(
        table.movedim(-1, 1),  # (1, C, H0, W0)
        lengths,
        mode=spec.interpolation,
        align_corners=spec.align_corners,
        antialias=spec.antialias,
    )
    return resized.movedim(1, -1)


def sampled(table: Tensor, patch_coord: Any, spec: ResizeSpec) -> Tensor:
    """A table (H0, W0, C), sampled by ``F.grid_sample`` at any coordinates (B, N, 2): (B, N, C), float32.

    Source: ``NaFlexEmbeds._apply_learned_naflex_pos_embed_grid_sample`` of timm 1.0.31.
    """
    image = table.float().movedim(-1, 0).expand(len(patch_coord), -1, -1, -1)  # (B, C, H0, W0)
    embeddings = F.grid_sample(
        image,
        _places(patch_coord.to(table.device), spec),
        spec.interpolation,
        padding_mode="border",
        align_corners=spec.align_corners,
    )  # (B, C, N, 1)
    return embeddings[..., 0].transpose(1, 2)


def sampled_gradient(
    shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec, g: Tensor
) -> Tensor:
    """The transpose of :func:`sampled`: the gradient of a table of this shape (H0, W0, C).

    Computed in float32. ``g``: the gradient of the embeddings, (B, N, C).
    """
    image = torch.zeros(shape, device=g.device).movedim(-1, 0).expand(len(g), -1, -1, -1)
    modes = {"bilinear": 0, "bicubic": 2}  # as PyTorch's operator numbers them; 1 is "border"
    of_images, _ = torch.ops.aten.grid_sampler_2d_backward(
        g.float().transpose(1, 2)[..., None],  # (B, C, N, 1)
        image,
        _places(patch_coord.to(g.device), spec),
        modes[spec.interpolation],
        1,
        spec.align_corners,
        [True, False],
    )
    dtype = torch.promote_types(g.dtype, torch.float32)
    return of_images.sum(0).movedim(0, -1).to(dtype)


def _places(patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """Where coordinates (B, N, 2) lie for ``F.grid_sample``: (B, N, 1, 2) as (x, y) in -1 to 1."""
    coord = patch_coord.to(torch.float32)
    size = coord.amax(1, keepdim=True) + 1  # (B, 1, 2)
    if spec.ar_preserving:
        size = size.amax(2, keepdim=True)
    if spec.align_corners:
        places = 2 * coord / (size - 1).clamp(min=1) - 1
    else:
        places = (2 * coord + 1) / size - 1
    return places.flip(-1)[:, :, None]


def axis_matrix(
    n: int, n0: int, spec: ResizeSpec, dtype: torch.dtype, device: Any = "cpu"
) -> Tensor:
    """``A_n`` (n, N0) by ``F.interpolate``."""
    # PyTorch cannot resize half precision everywhere.
    exact = torch.promote_types(dtype, torch.float32)
    identity = torch.eye(n0, dtype=exact, device=device)
    return _resize_axis(identity, n, spec).to(dtype).contiguous()


class Taps(NamedTuple):
    """The cells that the rows of a matrix read, row by row, and their weights: (T,) each.

    They are NumPy's arrays: on so few numbers its operations cost a third of PyTorch's.
    """

    rows: Any
    columns: Any
    weights: Any
    offsets: Any  # which tap is the first of each row
    of_each_row: int  # how many taps; 0 where some rows have more than others
    shape: Size  # of the matrix

    def dense(self) -> Tensor:
        """The matrix, float64."""
        matrix = np.zeros(self.shape)
        np.add.at(matrix, (self.rows, self.columns), self.weights)
        return torch.from_numpy(matrix)


def grid_taps(
    grid: Size, table_size: Size, spec: ResizeSpec, dtype: torch.dtype, *, transpose: bool = False
) -> tuple[Taps, Taps]:
    """The taps of ``A_h`` (h, H0) and ``A_w`` (w, W0), or of their transposes."""
    h, w = grid
    h0, w0 = table_size
    height, width = spec.resized_size(h, w)
    if grid == spec.own_size(table_size):  # both are identities
        height, width = grid
    y = axis_taps(h, height, h0, spec, dtype, transpose)
    x = axis_taps(w, width, w0, spec, dtype, transpose)
    return y, x


@kept_by_arguments
def axis_taps(
    keep: int, n: int, n0: int, spec: ResizeSpec, dtype: torch.dtype, transpose: bool
) -> Taps:
    """The taps of the first ``keep`` rows of the matrix (n, n0) that resizes an axis.

    With ``transpose`` those of the transpose of these rows. They are all cells that PyTorch reads,
    those of weight 0 too. Which it reads, an infinity tells: whatever reads its cell becomes
    infinite, or NaN. So a NaN of a table spreads by these taps as by PyTorch's own resize.
    """
    if spec.samples:
        positions = torch.arange(keep, dtype=torch.float32, device="cpu")
        length = torch.tensor(n, dtype=torch.float32, device="cpu")
        cells, of_cells = tap_weights(positions, length, n0, spec)  # (keep, taps) each
        columns = cells.flatten().numpy()  # at the border the same cell twice
        weights = of_cells.flatten().to(dtype).numpy()
        rows = np.arange(keep).repeat(len(columns) // keep)
    else:
        # Unit vectors, and beside them the same with an infinity in place of each 1: (n0, 2*n0).
        signals = torch.eye(n0, 2 * n0, dtype=dtype, device="cpu")
        signals[:, n0:].fill_diagonal_(torch.inf)
        resized = _resize_axis(signals, n, spec)[:keep].numpy()  # (keep, 2*n0)
        rows, columns = (~np.isfinite(resized[:, n0:])).nonzero()
        weights = resized[rows, columns]
    shape = keep, n0
    if transpose:
        by_column = columns.argsort(kind="stable")
        rows, columns = columns[by_column], rows[by_column]
        weights = weights[by_column]
        shape = n0, keep
    offsets = rows.searchsorted(np.arange(shape[0]))
    most = len(rows) // shape[0]
    are_equal = (offsets == most * np.arange(shape[0])).all() and len(rows) == most * shape[0]
    of_each_row = most if are_equal else 0
    return Taps(
        rows, columns.astype(np.int32), weights, offsets.astype(np.int32), of_each_row, shape
    )


def _resize_axis(signals: Tensor, n: int, spec: ResizeSpec) -> Tensor:
    """Signals (n0, K), resized to n cells: (n, K)."""
    if spec.interpolation == "linear":
        return interpolate(signals, (n,), spec)[0]
    # One image of 2 equal columns, whose channels are the signals; one column is kept. With 1
    # column and antialiasing PyTorch returns wrong numbers (torch 2.4 to 2.15).
    columns = signals[:, None].expand(-1, 2, -1)  # (n0, 2, K)
    return interpolate(columns, (n, 2), spec)[0, :, 0]
