"""One-dimensional resize matrices and taps, read off ``torch.nn.functional.interpolate`` itself.

Resampling a table is linear and separable, ``pe(h, w) = A_h . P . A_w^T``. Resizing an identity basis returns the
columns of ``A_n``, and so PyTorch's own weights in PyTorch's own rounding: the cubic kernel of Keys (1981, "Cubic
convolution interpolation for digital image processing") with coefficient -0.5 when antialiased (taps outside the
table dropped, the rest renormalised) and -0.75 otherwise (taps clamped to the border), or the triangle.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SEPARABLE_MODES = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Resampling:
    """How timm resamples a learned (H0, W0, C) table, by its own attribute names without ``pos_embed_``.

    Args:
        mode: ``"bilinear"`` or ``"bicubic"``.
        antialias: widen the filter when the table is made smaller.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        sampler: ``"interpolate"``, or ``"grid_sample"`` or ``"affine_grid"`` for the positions of timm's flag.
    """

    mode: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    sampler: str = "interpolate"

    def lengths(self, h: int, w: int) -> tuple[int, int]:
        """The size the table is resized to for an (h, w) grid, before the crop."""
        return (max(h, w),) * 2 if self.ar_preserving else (h, w)


def check_size(size: tuple[int, int]) -> None:
    """Raise ValueError unless ``size`` is (h, w), two integers of at least 1."""
    if isinstance(size, int) or len(size) != 2 or any(isinstance(n, (float, str)) for n in size) or min(size) < 1:
        got = size if isinstance(size, (int, str)) else tuple(size)
        raise ValueError(f"size must be (h, w), both integers of at least 1; got {got!r}")


def check_mode(mode: str) -> None:
    """Raise ValueError for a table mode that is not separable."""
    if mode not in SEPARABLE_MODES:
        raise ValueError(f"mode={mode!r} cannot be resampled exactly; valid: {', '.join(map(repr, SEPARABLE_MODES))}")


def constants(device: torch.device | str) -> ExitStack:
    """The context in which tensors to be kept are made: ordinary ones, whatever the caller runs under.

    An inference tensor kept could not be used in training later, and a fake one (of a tracer) never.
    """
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(torch.device(device).type, enabled=False))
    return stack


@lru_cache(maxsize=2048)
def resize_matrix(
    n: int,
    n0: int,
    mode: str = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The matrix A (n, n0) with ``F.interpolate(signal, n) == A @ signal`` along one axis.

    ``mode="linear"`` is ``F.interpolate``'s 1-D mode (never antialiased). Cached; treat the result as read-only.
    """
    with constants(device):
        return traceable_resize_matrix(n, n0, mode, antialias, align_corners, dtype, device)


def traceable_resize_matrix(
    n: int, n0: int, mode: str, antialias: bool, align_corners: bool, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """As :func:`resize_matrix`, by PyTorch's operations alone, for tracers that cannot look into a cache."""
    basis = torch.eye(n0, dtype=dtype, device=device)
    if mode == "linear":
        return F.interpolate(basis[None], size=n, mode=mode, align_corners=align_corners)[0].t().contiguous()
    check_mode(mode)
    # Width 4, not 1: an (N, 1, H, 1) tensor passes for channels-last and F.interpolate(antialias=True) then
    # returns wrong numbers (seen in torch 2.15).
    basis = basis.reshape(n0, 1, n0, 1).expand(-1, -1, -1, 4).contiguous()
    resized = F.interpolate(basis, size=(n, 4), mode=mode, antialias=antialias, align_corners=align_corners)
    return resized[:, 0, :, 0].t().contiguous()


def axis_matrices(
    h: int, w: int, table_size: tuple[int, int], how: Resampling, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """``(A_h, A_w)`` of shapes (h, H0) and (w, W0), or None where timm adds the table as it is."""
    if (h, w) == tuple(table_size):
        return None
    rows, cols = how.lengths(h, w)
    rest = (how.mode, how.antialias, how.align_corners, dtype, device)
    return resize_matrix(rows, table_size[0], *rest)[:h], resize_matrix(cols, table_size[1], *rest)[:w]


def taps(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The band of ``matrix`` (n, n0): indices and weights, both (n, K), K the widest row's count of non-zeros."""
    nonzero = matrix != 0
    count = max(int(nonzero.sum(1).max()), 1)
    index = nonzero.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    return index, matrix.gather(1, index)
