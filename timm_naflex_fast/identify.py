"""Which convention did a port follow, when it resampled a position table? All of them are tried, the best comes first.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers them all. This
file writes the formula out and does not read it off ``F.interpolate``, which has no other cubic coefficient and no
other positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .resampling.grids import sizes_on_host

Sizes = Sequence[tuple[int, int, int]]  # (t, h, w): t frames
TIE = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones


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
            weights = torch.zeros(len(to), n0, dtype=torch.float64)
            weights.scatter_add_(1, taps.clamp(0, n0 - 1).long(), self._filter(taps - position))
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
        """The tokens of all grids, packed (sum of t*h*w, C), float64, of a table (H0, W0, C) in float64."""
        packed = []
        for frames, h, w in sizes:
            grid = self.grid(table, w, h) if self.transposed in ("size", "table") else self.grid(table, h, w)
            if self.transposed in ("order", "table"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
        return torch.cat(packed)


def conventions(sizes: Sizes) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first."""
    merges = [m for m in (1, 2, 3, 4) if all(h % m == 0 and w % m == 0 for _, h, w in sizes)]
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
        size: (h, w) or, with t frames, (t, h, w); (B, 2) or (B, 3) for results packed one after the other. A tensor or
            a sequence.
        result: the tokens, (sum of t*h*w, C), or any shape with as many elements in that order.

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
    given = torch.as_tensor(size)
    sizes = sizes_on_host(given[None] if given.ndim == 1 else given)
    tokens, channels = sum(t * h * w for t, h, w in sizes), table.shape[-1]
    if result.numel() != tokens * channels:
        raise ValueError(f"result must have {tokens} tokens of {channels} channels; got shape {tuple(result.shape)}")
    if not (torch.isfinite(table).all() and torch.isfinite(result).all()):
        raise ValueError("table and result must be finite; they hold NaN or infinity")
    result = result.detach().cpu().double().reshape(tokens, channels)
    some = slice(None, None, -(-channels // 32))  # every channel follows the same convention: 32 find the best ten
    found = _ranked(conventions(sizes), table[..., some], sizes, result[:, some])
    best = _ranked((convention for _, convention in found[:10]), table, sizes, result)
    return [(error, asdict(convention)) for error, convention in best + found[10:]]


def _ranked(tried: Iterable[Convention], table: Tensor, sizes: Sizes, result: Tensor) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    largest = result.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    found = [(((result - c.tokens(table, sizes)).abs().max() / largest).item(), c) for c in tried]
    return sorted(found, key=lambda pair: round(pair[0], TIE))


def tolerance(result: Tensor) -> float:
    """The largest error that rounding explains: of positions in float32, or of the result to a half dtype."""
    return max(2e-4, 2 * torch.finfo(result.dtype).eps)


def words(convention: Convention) -> str:
    """A convention in words, what is usual left out."""
    c = convention
    exchanged = {"order": "tokens column by column", "size": "height and width exchanged", "table": "table transposed"}
    parts = {
        "with antialiasing" if c.antialias else "without antialiasing": True,
        f"cubic coefficient {c.cubic_coefficient}": c.cubic_coefficient not in (None, -0.5 if c.antialias else -0.75),
        "aligned corners": c.align_corners,
        "positions without half pixels": not (c.align_corners or c.half_pixel),
        "aspect-preserving (resized to a square, then cut)": c.ar_preserving,
        exchanged.get(c.transposed or "", ""): c.transposed,
        f"tokens in {c.merge} x {c.merge} blocks": c.merge > 1,
        f"{c.bfloat16} rounded to bfloat16": c.bfloat16,
    }
    return f"{c.mode} {', '.join(part for part, holds in parts.items() if holds)}"


def _check_table(table: Tensor) -> Tensor:
    if table.ndim == 4 and len(table) == 1:
        table = table[0]
    if table.ndim != 3 or not table.is_floating_point() or not table.numel():
        raise ValueError(
            f"table must be (H0, W0, C) or (1, H0, W0, C), floating point; got {tuple(table.shape)} {table.dtype}"
        )
    return table.detach().cpu().double()
