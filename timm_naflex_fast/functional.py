"""The resampling as plain functions, for other libraries: tensors in, tensors out, no timm class in sight.

Functions that end in ``_`` add into their first argument in place and return it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose as forms
from .resampling import exact as matmul
from .resampling import grid_sample
from .resampling import interpolate as interpolate_cached
from .resampling.grids import check_coord, check_tokens, group_grids
from .resampling.matrices import Resampling, check_mode, check_size, resize_matrix
from .resampling.patch_kernels import resample_patch_kernel

__all__ = [
    "add_factorized_pos_embed_",
    "add_pos_embed_",
    "resample_patch_kernel",
    "resample_pos_embed",
    "resize_matrix",
]

STRATEGIES = ("interpolate_cached", "grid_sample", "matmul")


def add_pos_embed_(
    x: Tensor,
    table: Tensor,
    patch_coord: Tensor,
    *,
    strategy: str = "matmul",
    mode: str = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    ar_preserving: bool = False,
    padding_mode: str = "border",
    dense_positions: bool = False,
) -> Tensor:
    """Resample a learned position table to each sample's grid and add it to the tokens, in place.

    Args:
        x: (B, N, C) tokens, floating point; modified.
        table: (H0, W0, C) or (1, H0, W0, C), any floating dtype; resampled in float32 and cast to ``x.dtype``.
        patch_coord: (B, N, 2) coordinates (y, x) in any number dtype; a sample's grid is its largest + 1.
        strategy: "matmul" or "interpolate_cached" (both equal timm's default), or "grid_sample" (drifts).
        mode: "bilinear" or "bicubic".
        antialias: as in ``F.interpolate``; "grid_sample" has none.
        align_corners: as in ``F.interpolate``.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        padding_mode: for "grid_sample" alone: "border", or "zeros" as in timm issue 2514.
        dense_positions: for "grid_sample" alone: round positions as that issue and older timm do.

    Returns:
        ``x``. Tokens past the end of their grid are untouched, except with "grid_sample", as in timm.

    Raises:
        ValueError: unknown strategy or mode, shapes that do not fit, negative coordinates; where "matmul" reads nothing
            back to the host (on CUDA, in graphs) a token with a negative coordinate gets no such error: on CUDA NaN.

    Source: ``timm.models.naflexvit.NaFlexEmbeds._apply_learned_naflex_pos_embed``.
    """
    _check_strategy(strategy)
    check_mode(mode)
    _check_tensors(x=x, table=table)
    if table.ndim not in (3, 4) or (table.ndim == 4 and len(table) != 1):
        raise ValueError(f"table must have shape (H0, W0, C) or (1, H0, W0, C); got {tuple(table.shape)}")
    check_tokens(x, table.shape[-1])
    how = Resampling(mode, antialias, align_corners, ar_preserving)
    if strategy == "grid_sample":
        check_coord(patch_coord, x)
        grid_sample.add_learned(x, table, patch_coord, how, padding_mode=padding_mode, dense_positions=dense_positions)
    elif strategy == "matmul":
        forms.add_learned(x, table, patch_coord, how)
    else:
        interpolate_cached.add_learned(x, table, group_grids(patch_coord, x), how)
    return x


def add_factorized_pos_embed_(
    x: Tensor,
    table_y: Tensor,
    table_x: Tensor,
    patch_coord: Tensor,
    *,
    strategy: str = "matmul",
    ar_preserving: bool = False,
) -> Tensor:
    """Resample a row and a column table to each sample's grid and add their sum to the tokens, in place.

    Args:
        x: (B, N, C) tokens, floating point; modified.
        table_y, table_x: (H0, C) and (W0, C), or with a leading 1; resized by 1-D ``linear`` without antialiasing.
        patch_coord: (B, N, 2) coordinates (y, x).
        strategy: as in :func:`add_pos_embed_`.
        ar_preserving: resize both to L = max(h, w) and keep the first h and w.

    Returns:
        ``x``.

    Raises:
        ValueError: unknown strategy, shapes that do not fit, negative coordinates.

    Source: ``timm.models.naflexvit.NaFlexEmbeds._apply_factorized_naflex_pos_embed``.
    """
    _check_strategy(strategy)
    _check_tensors(x=x, table_y=table_y, table_x=table_x)
    for name, table in (("table_y", table_y), ("table_x", table_x)):
        if table.ndim not in (2, 3) or (table.ndim == 3 and len(table) != 1):
            raise ValueError(f"{name} must have shape (L, C) or (1, L, C); got {tuple(table.shape)}")
        check_tokens(x, table.shape[-1])
    if strategy == "grid_sample":
        check_coord(patch_coord, x)
        grid_sample.add_factorized(x, table_y, table_x, patch_coord, ar_preserving)
    elif strategy == "matmul":
        forms.add_factorized(x, table_y, table_x, patch_coord, Resampling(ar_preserving=ar_preserving))
    else:
        interpolate_cached.add_factorized(x, table_y, table_x, group_grids(patch_coord, x), ar_preserving)
    return x


def resample_pos_embed(
    table: Tensor,
    size: tuple[int, int],
    *,
    mode: str = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    ar_preserving: bool = False,
) -> Tensor:
    """Resample a position table (H0, W0, C) to (h, w, C), in its own floating dtype (float32 at least).

    Equals ``F.interpolate(..., size=(h, w))`` on the table; differentiable once in the table.

    Raises:
        ValueError: unknown mode, table not 3-D, or a size below 1.
    """
    check_mode(mode)
    if table.ndim != 3:
        raise ValueError(f"table must have shape (H0, W0, C); got {tuple(table.shape)}")
    check_size(size)
    how = Resampling(mode, antialias, align_corners, ar_preserving)
    return matmul.resample(table, size, how, dtype=torch.promote_types(table.dtype, torch.float32))


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not a strategy; valid: {', '.join(map(repr, STRATEGIES))}")


def _check_tensors(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor of real numbers; got {got}")
