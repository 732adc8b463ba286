"""Which convention did a port follow, when it resampled a position table? All of them are tried, the best comes first.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers them all. This
file writes the formula out and does not read it off ``F.interpolate``, which has no other cubic coefficient and no
other positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

Sizes = Sequence[tuple[int, int]]
TIE = 1e-9  # errors closer than this come from conventions that agree on these sizes


@dataclass(frozen=True)
class Convention:
    """How a table (H0, W0, C) becomes the tokens of an (h, w) grid.

    Args:
        mode: "bilinear" or "bicubic".
        antialias: the filter is as much wider as the table becomes smaller.
        align_corners: the outermost cells of table and grid coincide.
        half_pixel: cell i has its centre at i + 1/2; without it, and without align_corners, position i is i * scale.
        ar_preserving: resized to (L, L), L = max(h, w), then cut to the top-left (h, w).
        cubic_coefficient: Keys' coefficient (bicubic only); PyTorch's is -0.5 with antialiasing and -0.75 without.
        transposed: None, or what was taken for its transpose: the tokens' "order", the "size", or the "table".
        merge: tokens come in blocks of merge x merge cells.
        bfloat16: None, or what was rounded to bfloat16 before the sum: the "table", or the "weights" in ``A_n``.
    """

    mode: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    half_pixel: bool = True
    ar_preserving: bool = False
    cubic_coefficient: float | None = -0.5
    transposed: str | None = None
    merge: int = 1
    bfloat16: str | None = None

    def matrix(self, n: int, n0: int, keep: int) -> Tensor:
        """The first ``keep`` rows of ``A_n`` (n, n0), float64."""
        cells, to = torch.arange(n0, dtype=torch.float64), torch.arange(n, dtype=torch.float64)[:keep, None]
        scale = n0 / n if not self.align_corners else (n0 - 1) / (n - 1) if n > 1 else 0.0
        if self.antialias:
            # Taps outside the table are dropped, and the weights of the others are scaled to a sum of 1. PyTorch's
            # centres are those of half pixels, whatever align_corners says.
            half = 0.5 if self.half_pixel or self.align_corners else 0.0
            center = scale * (to + half) - half
            weights = self._filter((cells - center) / max(scale, 1.0))
            weights = weights / weights.sum(1, keepdim=True)
        else:
            # Taps outside the table take the value of its border.
            position = scale * (to + 0.5) - 0.5 if self.half_pixel else scale * to
            taps = position.floor() + torch.arange(-1, 3)
            index = taps.clamp(0, n0 - 1).long()
            weights = torch.zeros(len(to), n0, dtype=torch.float64).scatter_add_(
                1, index, self._filter(taps - position)
            )
        return weights.bfloat16().double() if self.bfloat16 == "weights" else weights

    def _filter(self, x: Tensor) -> Tensor:
        """The weight of a tap at distance x: a triangle, or the cubic kernel of Keys (1981)."""
        x, a = x.abs(), self.cubic_coefficient
        if a is None:
            return (1 - x).clamp(min=0)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))

    def grid(self, table: Tensor, h: int, w: int) -> Tensor:
        """The table (H0, W0, C), float64, resampled to (h, w, C); a table of that size is not changed."""
        rows, cols = table.shape[:2]
        table = table.bfloat16().double() if self.bfloat16 == "table" else table
        if (h, w) == (rows, cols):
            return table
        tall, wide = (max(h, w),) * 2 if self.ar_preserving else (h, w)
        strip = torch.tensordot(self.matrix(tall, rows, h), table, 1)
        return torch.einsum("wv,hvc->hwc", self.matrix(wide, cols, w), strip)

    def tokens(self, table: Tensor, sizes: Sizes) -> Tensor:
        """The tokens of all grids, packed (sum of h*w, C), float64, of a table (H0, W0, C) in float64."""
        packed = []
        for h, w in sizes:
            grid = self.grid(table, w, h) if self.transposed in ("size", "table") else self.grid(table, h, w)
            if self.transposed in ("order", "table"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3))
        return torch.cat(packed)


def conventions(sizes: Sizes) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first."""
    merges = [m for m in (1, 2, 3, 4) if all(h % m == 0 and w % m == 0 for h, w in sizes)]
    choices = product(
        (None, "table", "weights"),
        merges,
        (None, "order", "size", "table"),
        (False, True),
        [(False, True), (True, False), (False, False)],
        (True, False),
        [("bilinear", None), ("bicubic", -0.5), ("bicubic", -0.75)],
    )
    for rounded, merge, transposed, ar, (corners, half), antialias, (mode, coefficient) in choices:
        yield Convention(mode, antialias, corners, half, ar, coefficient, transposed, merge, rounded)


def identify_resampling(table: Tensor, size: Any, result: Tensor) -> list[tuple[float, dict[str, Any]]]:
    """Find the convention by which ``table`` was resampled to ``result``.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), floating point.
        size: (h, w), or (B, 2) as a tensor or a sequence, for results packed one after the other.
        result: the tokens, (sum of h*w, C), or any shape with as many elements in that order.

    Returns:
        ``(error, settings)`` of every convention, the smallest error first: the largest difference, relative to the
        largest absolute value of ``result``. ``settings`` are the fields of :class:`Convention`. Of conventions that
        agree on these sizes, the plainest comes first: a table made larger shows nothing of antialiasing.

    Raises:
        ValueError: shapes that do not fit, sizes below 1, or numbers that are not finite.

    >>> from timm_naflex_fast.functional import resample_pos_embed
    >>> table = torch.randn(16, 16, 8)
    >>> error, convention = identify_resampling(table, (9, 28), resample_pos_embed(table, (9, 28), mode="bilinear"))[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    table = _check_table(table)
    sizes = _check_sizes(size)
    tokens, channels = sum(h * w for h, w in sizes), table.shape[-1]
    if result.numel() != tokens * channels:
        raise ValueError(f"result must have {tokens} tokens of {channels} channels; got shape {tuple(result.shape)}")
    if not (torch.isfinite(table).all() and torch.isfinite(result).all()):
        raise ValueError("table and result must be finite; they hold NaN or infinity")
    result = result.detach().cpu().double().reshape(tokens, channels)
    some = slice(None, None, -(-channels // 32))  # every channel follows the same convention: 32 find the best ten
    found = [(_error(c, table[..., some], sizes, result[:, some]), c) for c in conventions(sizes)]
    found = _plainest_first(found)
    best = [(_error(c, table, sizes, result), c) for _, c in found[:10]]
    return [(error, asdict(convention)) for error, convention in _plainest_first(best) + found[10:]]


def _error(convention: Convention, table: Tensor, sizes: Sizes, result: Tensor) -> float:
    largest = result.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((result - convention.tokens(table, sizes)).abs().max() / largest).item()


def tolerance(result: Tensor) -> float:
    """The largest error that rounding explains: of positions in float32, or of the result to a half dtype."""
    return max(2e-4, 2 * torch.finfo(result.dtype).eps)


def words(settings: dict[str, Any]) -> str:
    """A convention in words, what is usual left out."""
    c = Convention(**settings)
    parts = [c.mode, "with antialiasing" if c.antialias else "without antialiasing"]
    if c.cubic_coefficient not in (None, -0.5 if c.antialias else -0.75):
        parts.append(f"cubic coefficient {c.cubic_coefficient}")
    if c.align_corners:
        parts.append("aligned corners")
    elif not c.half_pixel:
        parts.append("positions without half pixels")
    if c.ar_preserving:
        parts.append("aspect-preserving (resized to a square, then cut)")
    if c.transposed:
        parts.append(
            {"order": "tokens column by column", "size": "height and width exchanged", "table": "table transposed"}[
                c.transposed
            ]
        )
    if c.merge > 1:
        parts.append(f"tokens in {c.merge} x {c.merge} blocks")
    if c.bfloat16:
        parts.append(f"{c.bfloat16} rounded to bfloat16")
    return f"{parts[0]} {', '.join(parts[1:])}"


def _plainest_first(found: list[tuple[float, Convention]]) -> list[tuple[float, Convention]]:
    """Sorted by error; a run of errors closer than ``TIE`` keeps the order in which the conventions were tried."""
    order = sorted(range(len(found)), key=lambda i: found[i][0])
    runs: list[list[int]] = []
    for i in order:
        if runs and found[i][0] - found[runs[-1][-1]][0] <= TIE:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [found[i] for run in runs for i in sorted(run)]


def _check_table(table: Tensor) -> Tensor:
    if table.ndim == 4 and len(table) == 1:
        table = table[0]
    if table.ndim != 3 or not table.is_floating_point() or not table.numel():
        raise ValueError(
            f"table must be (H0, W0, C) or (1, H0, W0, C), floating point; got {tuple(table.shape)} {table.dtype}"
        )
    return table.detach().cpu().double()


def _check_sizes(size: Any) -> list[tuple[int, int]]:
    sizes = torch.as_tensor(size)
    sizes = sizes[None] if sizes.ndim == 1 else sizes
    if sizes.ndim != 2 or sizes.shape[1] != 2 or not len(sizes) or sizes.is_floating_point() or sizes.min() < 1:
        raise ValueError(f"sizes must be (h, w) or (B, 2), integers of at least 1; got {size}")
    return [(int(h), int(w)) for h, w in sizes.tolist()]
