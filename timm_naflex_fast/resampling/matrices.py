"""One-dimensional resize matrices, read off PyTorch's own resampling.

Resampling a table P (H0, W0, C) to a grid (h, w) is linear and separable::

    embedding(h, w) = A_h . P . A_w^T        A_n: the (n, N0) matrix that resizes one axis from N0 cells to n

To resize a unit vector is to read a column of ``A_n``. So we resize all of them, an identity
matrix, and get PyTorch's own weights with PyTorch's own rounding. The weights are a triangle
(bilinear), or the cubic kernel of Keys (1981, "Cubic convolution interpolation for digital image
processing"):

- antialiased, with the coefficient -0.5; taps outside the table are dropped, and the rest
  renormalised;
- otherwise with -0.75; taps outside move to the border.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]


@dataclass(frozen=True)
class ResizeSpec:
    """How a library resamples its position table.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"``
            for the two of a factorized one.
        antialias: widen the filter when the table is made smaller; always False for "linear" and
            with ``F.grid_sample``, which have none.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        reference: whose result it is: ``"interpolate"``, PyTorch's ``F.interpolate``; or
            ``F.grid_sample`` without antialiasing, at the positions of timm's
            ``pos_embed_use_grid_sample``: ``"grid_sample"`` of newer timm, ``"affine_grid"`` of
            older timm, and of every timm for "linear".
        batch_max: for ``"affine_grid"`` alone, the largest height and width of the batch: they
            change the rounding.

    Attributes:
        use_grid_sample: timm's grid_sample flag samples the table at every token's coordinate; so
            padding tokens get embeddings too, and a grid of the table's own size does not simply
            get the table.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    reference: str = "interpolate"
    batch_max: Size = (0, 0)
    use_grid_sample: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_interpolate = self.reference == "interpolate"
        if self.interpolation == "linear" and not is_interpolate:
            object.__setattr__(self, "reference", "affine_grid")
        object.__setattr__(
            self, "antialias", self.antialias and is_interpolate and self.interpolation != "linear"
        )
        object.__setattr__(self, "use_grid_sample", not is_interpolate)

    def resized_size(self, h: int, w: int) -> Size:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        return (max(h, w),) * 2 if self.ar_preserving else (h, w)


def interpolate(
    table: Tensor, lengths: tuple[int, ...], spec: ResizeSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A table ([1,] H0, W0, C), or ([1,] N0, C), resized by ``F.interpolate`` in ``dtype``: (1,
    *lengths, C)."""
    # Cell after cell in memory, whatever the table's own layout is: resized with antialiasing to a
    # width of 1, every other layout gives wrong numbers (PyTorch 2.4 to 2.15). So does a single
    # channel, which has no layout; two have.
    channels = table.shape[-1]
    if channels == 1 and lengths[1:] == (1,):
        table = table.repeat_interleave(2, -1)
    table = table if table.dtype is dtype else table.to(dtype)
    # The view gives axes of length 1 the usual strides, which PyTorch asks for too: NumPy's new
    # axes have stride 0.
    images = (
        table.contiguous().view(1, *table.shape[-1 - len(lengths) :]).movedim(-1, 1)
    )  # (1, C, H0, W0)
    mode, align_corners, antialias = spec.interpolation, spec.align_corners, spec.antialias
    resized = F.interpolate(
        images, lengths, mode=mode, align_corners=align_corners, antialias=antialias
    )
    resized = resized.movedim(1, -1)
    return resized if resized.shape[-1] == channels else resized[..., :channels]


def axis_matrix(
    axis: int,
    grid: Size,
    n0: int,
    spec: ResizeSpec,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
) -> Tensor:
    """``A_h`` (h, N0) for axis 0, ``A_w`` (w, N0) for axis 1, of a table with N0 cells along that
    axis."""
    identity = torch.eye(n0, dtype=_computed_in(spec, dtype), device=device)
    resized = _resize_axis(
        identity, grid[axis], spec.resized_size(*grid)[axis], spec, spec.batch_max[axis]
    )
    return resized.to(dtype).contiguous()


class Taps(NamedTuple):
    """For each row of a matrix the columns that are read, and their weights, both (n, K), K those
    of the fullest row.

    A row that reads fewer repeats its first column, with the weight 0; ``is_own`` (n, K) tells its
    own, ``reads`` how many there are together. NumPy's arrays: on so few numbers its operations
    cost a third of PyTorch's.
    """

    columns: Any
    weights: Any
    is_own: Any
    reads: int


def axis_taps(
    keep: int,
    n: int,
    n0: int,
    spec: ResizeSpec,
    batch_max: int,
    dtype: torch.dtype,
    transpose: bool,
) -> Taps:
    """The taps of the first ``keep`` rows of the matrix (n, n0) that resizes an axis; or of the
    transpose of these.

    They are all cells that PyTorch reads, those of weight 0 too. Which it reads, an infinity tells:
    whatever reads its cell becomes infinite, or NaN. So a NaN of a table spreads by these taps as
    it does by PyTorch's own resize.
    """
    identity = torch.eye(n0, dtype=_computed_in(spec, dtype), device="cpu")
    signals = torch.cat(
        (identity, identity / (1 - identity)), 1
    )  # (n0, 2*n0): infinity in place of each 1
    resized = _resize_axis(signals, keep, n, spec, batch_max).to(dtype).numpy()  # (keep, 2*n0)
    matrix, read = resized[:, :n0], ~np.isfinite(resized[:, n0:])
    return taps(matrix.T, read.T) if transpose else taps(matrix, read)


def taps(matrix: Any, read: Any) -> Taps:
    """The taps of a matrix (n, n0) of which the cells ``read`` (n, n0), boolean, are read."""
    counts = read.sum(1, keepdims=True)  # (n, 1)
    nth = np.arange(max(int(counts.max()), 1))  # (K,), side by side
    is_own = nth < counts
    columns = read.argmax(1)[:, None] + nth * is_own  # (n, K)
    weights = matrix[np.arange(len(matrix))[:, None], columns] * is_own
    return Taps(columns.astype(np.int32), weights, is_own, int(counts.sum()))


def _computed_in(spec: ResizeSpec, dtype: torch.dtype) -> torch.dtype:
    """PyTorch cannot resize half precision everywhere; timm's grid_sample flag computes its
    positions in float32."""
    return (
        torch.promote_types(dtype, torch.float32)
        if spec.reference == "interpolate"
        else torch.float32
    )


def _resize_axis(signals: Tensor, keep: int, n: int, spec: ResizeSpec, batch_max: int) -> Tensor:
    """Signals (n0, K), resized to n cells, of which the first ``keep`` are kept: (keep, K)."""
    if spec.reference == "affine_grid":
        resized = sample_signals(signals, affine_positions(n, batch_max), spec)
    elif spec.reference == "grid_sample":
        resized = sample_signals(signals, cell_positions(n, spec.align_corners), spec)
    elif spec.interpolation == "linear":
        resized = interpolate(signals, (n,), spec, signals.dtype)[0]
    else:
        # One image of 2 equal columns, whose channels are the signals; one column is kept. With 1
        # column and antialiasing PyTorch returns wrong numbers (torch 2.4 to 2.15).
        signals = signals[:, None].expand(-1, 2, -1)
        resized = interpolate(signals, (n, 2), spec, signals.dtype)[0, :, 0]
    return resized[:keep]


def sample_signals(signals: Tensor, y: Tensor, spec: ResizeSpec) -> Tensor:
    """Signals (n0, K), sampled by ``F.grid_sample`` at positions ``y`` (n,) in [-1, 1]: (n, K)."""
    # One image whose channels are the signals, n0 high and 1 wide, sampled at x = 0 and each
    # position y.
    image = signals.t()[None, ..., None]  # (1, K, n0, 1)
    positions = torch.stack((torch.zeros_like(y), y), 1).view(1, -1, 1, 2)
    mode = "bilinear" if spec.interpolation == "linear" else spec.interpolation
    sampled = F.grid_sample(
        image, positions, mode=mode, padding_mode="border", align_corners=spec.align_corners
    )
    return sampled[0, :, :, 0].t()


def cell_positions(n: int, align_corners: bool) -> Tensor:
    """Where the n cells of an axis lie in [-1, 1], in the order of timm's float32 operations."""
    cell = torch.arange(n, dtype=torch.float32, device="cpu")
    return 2.0 * cell / max(n - 1, 1) - 1.0 if align_corners else (2.0 * cell + 1.0) / n - 1.0


def affine_positions(n: int, batch_max: int) -> Tensor:
    """The same positions as older timm rounds them: the first n of an affine grid as long as the
    batch's largest."""
    zoom = torch.tensor(batch_max, dtype=torch.float32, device="cpu") / n
    theta = F.pad(
        torch.stack((zoom, zoom - 1))[None, None], (1, 0, 1, 0)
    )  # (1, 2, 3); nothing reads x
    return F.affine_grid(theta, [1, 1, batch_max, 1], align_corners=False)[0, :n, 0, 1]
