"""One-dimensional resize matrices, read off PyTorch's own resampling.

Resampling a table P (H0, W0, C) to a grid (h, w) is linear and separable::

    embedding(h, w) = A_h . P . A_w^T        A_n: the (n, N0) matrix that resizes one axis from N0 cells to n

To resize a unit vector is to read a column of ``A_n``. So we resize all of them, an identity matrix, and get PyTorch's
own weights with PyTorch's own rounding. The weights are a triangle (bilinear), or the cubic kernel of Keys (1981,
"Cubic convolution interpolation for digital image processing"):

- antialiased, with the coefficient -0.5; taps outside the table are dropped, and the rest renormalised;
- otherwise with -0.75; taps outside move to the border.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced


@dataclass(frozen=True)
class ResizeSpec:
    """How a library resamples its position table.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"`` for the two of a
            factorized one.
        antialias: widen the filter when the table is made smaller.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        sampler: ``"interpolate"``, PyTorch's ``F.interpolate``; or ``F.grid_sample`` without antialiasing, at the
            positions of timm's ``pos_embed_use_grid_sample``: ``"grid_sample"`` of newer timm, ``"affine_grid"`` of
            older timm.
        batch_max: for ``"affine_grid"`` alone, the largest height and width of the batch: they change the rounding.

    Attributes:
        copies_own_size: a grid of the table's own size gets the table itself.
        embeds_padding: padding tokens get the embedding of the cell that they name: timm's flag does so.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    sampler: str = "interpolate"
    batch_max: tuple[int, int] = (0, 0)
    copies_own_size: bool = field(init=False, repr=False, compare=False)
    embeds_padding: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_interpolate = self.sampler == "interpolate"
        object.__setattr__(self, "copies_own_size", is_interpolate)
        object.__setattr__(self, "embeds_padding", not is_interpolate)

    def lengths(self, h: int, w: int) -> tuple[int, int]:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        return (max(h, w),) * 2 if self.ar_preserving else (h, w)


def axis_matrix(axis: int, h: int, w: int, n0: int, spec: ResizeSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """``A_h`` (h, N0) for axis 0, ``A_w`` (w, N0) for axis 1, of a table with N0 cells along that axis; on the CPU."""
    n = spec.lengths(h, w)[axis]
    if spec.sampler == "interpolate":
        matrix = resize_matrix(n, n0, spec.interpolation, spec.antialias, spec.align_corners, dtype)
    else:
        matrix = sample_matrix(n, n0, spec, spec.batch_max[axis]).to(dtype)
    return matrix[: (h, w)[axis]]  # with ar_preserving the first rows; otherwise all


def resize_matrix(
    n: int,
    n0: int,
    mode: str,
    antialias: bool,
    align_corners: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The matrix A (n, n0) with ``F.interpolate(signal, n) == A @ signal`` along one axis.

    ``mode="linear"`` is the 1-D mode of ``F.interpolate``, which has no antialiasing. Half precision is rounded at the
    end: PyTorch cannot resize in it everywhere.
    """
    if dtype.itemsize < 4:
        return resize_matrix(n, n0, mode, antialias, align_corners, torch.float32, device).to(dtype)
    basis = torch.eye(n0, dtype=dtype, device=device)
    if mode == "linear":
        return F.interpolate(basis[None], size=n, mode=mode, align_corners=align_corners)[0].t().contiguous()
    # Each unit vector becomes an image of 4 equal columns, and one column is kept. Not an image of 1 column: PyTorch
    # takes an (N, 1, H, 1) tensor for a channels-last one and then returns wrong numbers (torch 2.4 to 2.15).
    images = basis.reshape(n0, 1, n0, 1).expand(-1, -1, -1, 4).contiguous()
    resized = F.interpolate(images, size=(n, 4), mode=mode, antialias=antialias, align_corners=align_corners)
    return resized[:, 0, :, 0].t().contiguous()


def sample_matrix(n: int, n0: int, spec: ResizeSpec, batch_max: int) -> Tensor:
    """The matrix A (n, n0), float32, with which timm's flag samples one axis: ``F.grid_sample`` at timm's positions."""
    is_affine = spec.sampler == "affine_grid"
    y = affine_positions(n, batch_max) if is_affine else cell_positions(n, spec.align_corners)
    return sample(torch.eye(n0, dtype=torch.float32, device="cpu"), y, spec).contiguous()


def sample(signals: Tensor, y: Tensor, spec: ResizeSpec) -> Tensor:
    """Signals (K, n0), sampled by ``F.grid_sample`` at positions ``y`` (n,) in [-1, 1]: (n, K)."""
    # One image whose channels are the signals, n0 high and 1 wide, sampled at x = 0 and each position y.
    image = signals.view(1, *signals.shape, 1)
    positions = torch.stack((torch.zeros_like(y), y), -1).view(1, -1, 1, 2)
    mode = "bilinear" if spec.interpolation == "linear" else spec.interpolation
    sampled = F.grid_sample(image, positions, mode=mode, padding_mode="border", align_corners=spec.align_corners)
    return sampled[0, :, :, 0].t()


def cell_positions(n: int, align_corners: bool) -> Tensor:
    """Where the n cells of an axis lie in [-1, 1], in the order of timm's float32 operations."""
    cell = torch.arange(n, dtype=torch.float32, device="cpu")
    return 2.0 * cell / max(n - 1, 1) - 1.0 if align_corners else (2.0 * cell + 1.0) / n - 1.0


def affine_positions(n: int, batch_max: int) -> Tensor:
    """The same positions as older timm rounds them: the first n of an affine grid as long as the batch's largest."""
    zoom = torch.tensor(batch_max, dtype=torch.float32, device="cpu") / n
    theta = torch.tensor([[(0, 0, 0), (0, zoom, zoom - 1)]], dtype=torch.float32, device="cpu")
    return F.affine_grid(theta, [1, 1, batch_max, 1], align_corners=False)[0, :n, 0, 1]


def taps(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The non-zeros of each row of ``matrix`` (n, n0): columns and weights, both (n, K), K those of the fullest row.

    A row with fewer is filled up with columns whose weight is 0.
    """
    nonzero = matrix != 0
    count = max(int(nonzero.sum(1).max()), 1)
    index = nonzero.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    return index, matrix.gather(1, index)
