"""The resampling as plain functions, for other libraries: tensors in, tensors out.

Functions that end in ``_`` add into their first argument in place and return it.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .names import StrategyName, check_valid
from .patch_embed import resample_patch_kernel
from .pos_embed import graphs
from .pos_embed.checks import check_numbers, check_size
from .pos_embed.sizes import Sizes, coordinates_of
from .pos_embed.strategies import EXACT, STRATEGIES
from .pos_embed.table import INTERPOLATIONS, ResizeSpec, factorized_spec, learned_spec
from .pos_embed.tokens import check_tokens
from .pos_embed.weights import axis_matrix
from .tracing import backend_for

__all__ = [
    "add_factorized_pos_embed_",
    "add_pos_embed_",
    "resample_patch_kernel",
    "resample_pos_embed",
    "resample_pos_embeds",
    "resize_matrix",
]

Interpolation = Literal["bilinear", "bicubic"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GridSizes = Tensor | Sequence[Sequence[int]]


def add_pos_embed_(
    x: Tensor,
    table: Tensor,
    patch_coord: Tensor | None = None,
    *,
    grid_sizes: GridSizes | None = None,
    strategy: StrategyName = "matmul",
    mode: Interpolation = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    ar_preserving: bool = False,
) -> Tensor:
    """Add a learned position table, resampled to each sample's grid, to the tokens. SigLIP-2 needs
    ``mode="bilinear"``.

    Args:
        x: (B, N, C) tokens, float16, bfloat16, float32 or float64; modified.
        table: (H0, W0, C) or (1, H0, W0, C), of one of these dtypes; resampled in float32, where
            ``x`` is float64 in float64 (not by "interpolate_cached"), and cast to ``x.dtype``.
        patch_coord: (B, N, 2) coordinates (y, x) in any number dtype; a sample's grid is its
            largest + 1.
        grid_sizes: instead of coordinates, (B, 2) sizes (h, w); the tokens of a sample are in
            row-major order.
        strategy: "matmul" or "interpolate_cached" (both equal timm's default), or "grid_sample"
            (timm's pos_embed_use_grid_sample: another result, without antialiasing).
        mode: "bilinear" or "bicubic".
        antialias: as in ``F.interpolate``; "grid_sample" has none.
        align_corners: as in ``F.interpolate``.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).

    Returns:
        ``x``. Tokens after those of the grid are untouched, except with "grid_sample", as in timm:
        they get the cell that their coordinate names, (0, 0).

    Raises:
        ValueError: unknown strategy or mode, another dtype or device, a sparse, quantized or nested
            tensor, shapes that do not fit; negative coordinates, or a grid far larger than the
            number of tokens ("grid_sample" samples at any coordinate). In an exported or traced
            program, and in a CUDA graph, nothing is read back to the host, so a negative coordinate
            raises no error: the token becomes NaN.
        RuntimeError: ``x`` may not be changed in place.

    Source: ``timm.models.naflexvit.NaFlexEmbeds._apply_learned_naflex_pos_embed``.

    >>> x, table = torch.zeros(2, 12, 8), torch.randn(16, 16, 8)
    >>> y = add_pos_embed_(x, table, grid_sizes=[(3, 4), (5, 2)], mode="bilinear")
    >>> y is x, bool((x[1, 10:] == 0).all())  # tokens after the second grid are padding
    (True, True)
    """
    _check_floats(x, "x")
    _check_table(table, "table", "H0, W0, C", x)
    check_valid("strategy", strategy, STRATEGIES)
    check_valid("mode", mode, INTERPOLATIONS)
    samples = strategy == "grid_sample"
    spec = learned_spec(mode, antialias, align_corners, ar_preserving, samples, samples)
    # Everything is checked before the first write: an error leaves ``x`` as it was.
    if (patch_coord is None) == (grid_sizes is None):
        raise ValueError("give either patch_coord or grid_sizes, not both and not neither")
    if patch_coord is None:
        # Sizes become coordinates, so that from here on there is one way.
        check_tokens(x, table.shape[-1])
        patch_coord = coordinates_of(grid_sizes, x)
    else:
        check_numbers(patch_coord, "patch_coord")
    backend = backend_for(x, table, patch_coord)
    graphs.add(x, (table,), patch_coord, spec, strategy, backend)
    return x


def add_factorized_pos_embed_(
    x: Tensor,
    table_y: Tensor,
    table_x: Tensor,
    patch_coord: Tensor,
    *,
    strategy: Literal["matmul", "interpolate_cached"] = "matmul",
    ar_preserving: bool = False,
) -> Tensor:
    """Add a row and a column table, resampled to each sample's grid, to the tokens, in place.

    Args:
        x: (B, N, C) tokens, floating point; modified.
        table_y, table_x: (H0, C) and (W0, C), or with a leading 1; resized by 1-D ``linear``
            without antialiasing.
        patch_coord: (B, N, 2) coordinates (y, x).
        strategy: as in :func:`add_pos_embed_`, but for "grid_sample".
        ar_preserving: resize both to L = max(h, w) and keep the first h and w.

    Returns:
        ``x``.

    Raises:
        ValueError: unknown strategy, tensors that :func:`add_pos_embed_` refuses, shapes that do
            not fit, negative coordinates (as in :func:`add_pos_embed_`).
        RuntimeError: ``x`` may not be changed in place.

    Source: ``timm.models.naflexvit.NaFlexEmbeds._apply_factorized_naflex_pos_embed``.

    >>> coord = torch.cartesian_prod(torch.arange(3), torch.arange(4))[None]
    >>> rows, columns = torch.randn(16, 8), torch.randn(16, 8)
    >>> add_factorized_pos_embed_(torch.zeros(1, 12, 8), rows, columns, coord).shape
    torch.Size([1, 12, 8])
    """
    _check_floats(x, "x")
    _check_table(table_y, "table_y", "H0, C", x)
    _check_table(table_x, "table_x", "W0, C", x)
    check_numbers(patch_coord, "patch_coord")
    # timm's flag samples lines at other positions than cells.
    check_valid("strategy", strategy, EXACT)
    table = (table_y, table_x)
    spec = factorized_spec(ar_preserving)
    backend = backend_for(x, table_y, table_x, patch_coord)
    graphs.add(x, table, patch_coord, spec, strategy, backend)
    return x


def resample_pos_embeds(
    table: Tensor,
    grid_sizes: GridSizes,
    *,
    mode: Interpolation,
    antialias: bool = True,
    align_corners: bool = False,
    ar_preserving: bool = False,
    length: int | None = None,
    padding: Literal["zeros", "first"] = "zeros",
    merge: int = 1,
    strategy: StrategyName = "matmul",
) -> Tensor:
    """The position embeddings of a batch of images, one after the other or padded to one length.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), floating point; differentiable.
        grid_sizes: (B, 2) sizes (h, w), or (B, 3) as (t, h, w): the h*w cells of an image are
            repeated t times, for t frames. A tensor or a sequence; on the host nothing is read back
            from a device.
        mode: "bilinear" (SigLIP-2) or "bicubic". There is no default: the wrong one gives wrong
            embeddings silently.
        antialias, align_corners, ar_preserving: as in :func:`add_pos_embed_`.
        length: N, to pad each image to N tokens.
        padding: what the tokens after an image hold: "zeros", or the "first" cell (transformers'
            convention; its gradient includes theirs).
        merge: m, to put the cells in blocks of m x m, block after block (the order of Qwen, Kimi,
            Ovis and Cosmos).
        strategy: "matmul" or "interpolate_cached" (the same result), or "grid_sample" (no
            antialiasing: drifts).

    Returns:
        (sum of t*h*w, C), or with ``length`` (B, N, C), in the table's dtype; computed in float32
        at least.

    Raises:
        ValueError: unknown mode, strategy or padding, a table that :func:`add_pos_embed_` refuses,
            shapes that do not fit, a size below 1, a ``merge`` that does not divide a size, a
            ``length`` too small for an image. In a graph, packed embeddings need sizes on the host.
        RuntimeError: in a graph, when it runs with a tensor of sizes that do not fit.

    >>> table = torch.randn(16, 16, 8)
    >>> resample_pos_embeds(table, [(3, 4), (10, 6)], mode="bilinear").shape
    torch.Size([72, 8])
    >>> resample_pos_embeds(table, [(3, 4), (10, 6)], mode="bilinear", length=64, padding="first").shape
    torch.Size([2, 64, 8])
    """
    _check_table(table, "table", "H0, W0, C")
    check_valid("strategy", strategy, STRATEGIES)
    check_valid("mode", mode, INTERPOLATIONS)
    check_valid("padding", padding, ("zeros", "first"))
    if merge < 1:
        raise ValueError(f"merge must be an integer of at least 1; got {merge!r}")
    samples = strategy == "grid_sample"
    spec = learned_spec(mode, antialias, align_corners, ar_preserving, samples, True)
    sizes = Sizes(grid_sizes, merge=merge, length=length, padding=padding)
    # Nobody writes into the table, so only its own class and transforms count.
    return graphs.resample((table,), sizes, spec, strategy, backend_for(table))


def resample_pos_embed(
    table: Tensor,
    size: tuple[int, int],
    *,
    mode: Interpolation = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    ar_preserving: bool = False,
) -> Tensor:
    """Resample a position table (H0, W0, C) to (h, w, C).

    In its own floating dtype, float32 at least. Equals ``F.interpolate(..., size=(h, w))`` on the
    table; differentiable in the table. SigLIP-2 needs ``mode="bilinear"``.

    Raises:
        ValueError: unknown mode, a table that :func:`add_pos_embed_` refuses, another shape of the
            table, or a size below 1.

    >>> resample_pos_embed(torch.randn(16, 16, 8), (9, 28), mode="bilinear").shape
    torch.Size([9, 28, 8])
    """
    _check_table(table, "table", "H0, W0, C")
    h, w = check_size(size)
    # First, because the embeddings come back in the dtype of the table.
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    cells = resample_pos_embeds(
        table,
        [(h, w)],
        mode=mode,
        antialias=antialias,
        align_corners=align_corners,
        ar_preserving=ar_preserving,
    )  # (h*w, C)
    return cells.view(h, w, -1)


def resize_matrix(
    n: int,
    n0: int,
    mode: Literal["bilinear", "bicubic", "linear"] = "bicubic",
    antialias: bool = True,
    align_corners: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The matrix A (n, n0) with ``F.interpolate(signal, n) == A @ signal`` along one axis.

    Args:
        n, n0: the new length and the old one.
        mode: "bilinear", "bicubic", or "linear" (the 1-D mode of ``F.interpolate``, never
            antialiased).
        antialias, align_corners: as in ``F.interpolate``.
        dtype, device: of the matrix.

    Raises:
        ValueError: an unknown mode, or a length below 1.

    >>> resize_matrix(2, 4, "bilinear", antialias=False)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    n, n0 = check_size((n, n0))
    check_valid("mode", mode, (*INTERPOLATIONS, "linear"))
    spec = ResizeSpec(mode, antialias and mode != "linear", align_corners)
    return axis_matrix(n, n0, spec, dtype).to(device)


def _check_table(table: Any, name: str, shape: str, x: Tensor | None = None) -> None:
    """It must have this shape, with a leading 1 or not; if there are tokens ``x``, on their device."""
    _check_floats(table, name)
    # PyTorch itself adds whatever is in memory where a table of the device meta should be.
    if x is not None and table.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}; got {table.device}")
    # timm's parameters have a leading 1, other libraries' have none.
    ndim = len(shape.split())
    if table.ndim != ndim and table.shape[:-ndim] != (1,):
        got = tuple(table.shape)
        raise ValueError(f"{name} must have shape ({shape}) or (1, {shape}); got {got}")


def _check_floats(tensor: Any, name: str) -> None:
    """It must be of one of the dtypes that PyTorch computes in."""
    check_numbers(tensor, name)
    if tensor.dtype not in FLOATS:
        raise ValueError(
            f"{name} must be floating point, float16, bfloat16, float32 or float64; "
            f"got {tensor.dtype}"
        )
