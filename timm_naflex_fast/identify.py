"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table?

All of them are tried, the best comes first. Every convention is separable, ``A_h . P . A_w^T``, so
one formula for the 1-D matrix ``A_n`` covers them all. This file writes the formula out and does
not read it off ``F.interpolate``, which has no other cubic coefficient and no other positions. Nor
does ``closed_form`` have them, whose positions are rounded as PyTorch rounds them.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch.layout import sizes_on_host
from .resampling.closed_form import cubic_kernel

Grids = Sequence[tuple[int, int, int]]  # (t, h, w): t frames
DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
OUTSIDE = 2  # cells beyond a border that a tap without antialiasing can reach
SOME_CHANNELS = 32  # all follow the same convention, so that some of them find the best ones
BEST = 10


@dataclass(frozen=True)
class Convention:
    """How a table (H0, W0, C) becomes the tokens of an (h, w) grid.

    Args:
        mode: "bilinear" or "bicubic".
        antialias: the filter is as much wider as the table becomes smaller.
        align_corners: the outermost cells of table and grid coincide.
        half_pixel: cell i has its centre at i + 1/2; without it, and without align_corners,
            position i is i * scale. Both together: centres of cells, taken for distances between
            the centres of the outermost cells.
        ar_preserving: resized to (L, L), L = max(h, w), then cut to the top-left (h, w).
        cubic_coefficient: Keys' coefficient (bicubic only); PyTorch's is -0.5 with antialiasing and
            -0.75 without.
        transposed: None, or what was taken for its transpose: the tokens' "order", the "size", or
            the "table".
        merge: tokens come in blocks of merge x merge cells.
        bfloat16: None, or what was rounded to bfloat16 before the sum: the "table", or the
            "weights" in ``A_n``.
        drops_outside: without antialiasing too, taps outside the table are dropped, not moved to
            its border.
        zeros_outside: without antialiasing, cells outside the table are zeros (``grid_sample``'s
            own padding).
        edges: the outermost cells of the grid lie on the table's edges (with neither of the two
            above).
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
    drops_outside: bool = False
    zeros_outside: bool = False
    edges: bool = False

    @property
    def moves_cells(self) -> bool:
        """Whether a grid of the table's own size differs from the table."""
        return self.edges or (self.align_corners and self.half_pixel)

    def positions(self, n: int, n0: int) -> tuple[Tensor, float]:
        """Where the n cells of an axis lie among the n0 of the table, and the step between them.

        Cell i of the table lies at i.
        """
        i = torch.arange(n, dtype=torch.float64)
        if self.edges:
            step = n0 / max(n - 1, 1)
            return step * i - 0.5, step
        if self.align_corners and self.half_pixel:
            step = (n0 - 1) / n
            return step * (i + 0.5), step
        if self.align_corners:
            # With antialiasing PyTorch changes the step here and not the centres.
            step = (n0 - 1) / (n - 1) if n > 1 else 0.0
            from_centres = self.antialias
        else:
            step = n0 / n
            from_centres = self.half_pixel
        if from_centres:
            return step * (i + 0.5) - 0.5, step
        return step * i, step

    def matrix(self, n: int, n0: int) -> Tensor:
        """``A_n`` (n, n0), float64."""
        centres, step = self.positions(n, n0)
        stretch = max(step, 1.0) if self.antialias else 1.0
        cells = torch.arange(-OUTSIDE, n0 + OUTSIDE)
        distance = (cells - centres[:, None]).abs() / stretch  # (n, cells)
        if self.cubic_coefficient is None:
            weights = (1 - distance).clamp(min=0)
        else:
            weights = cubic_kernel(distance, self.cubic_coefficient)
        before, matrix, after = weights.split([OUTSIDE, n0, OUTSIDE], 1)
        if self.antialias or self.drops_outside:
            matrix = matrix / matrix.sum(1, keepdim=True)
        elif not self.zeros_outside:  # taps outside take the border's value
            matrix[:, 0] += before.sum(1)
            matrix[:, -1] += after.sum(1)
        if self.bfloat16 == "weights":
            matrix = matrix.bfloat16().double()
        return matrix

    def grid(self, table: Tensor, h: int, w: int) -> Tensor:
        """The table (H0, W0, C), float64, resampled to (h, w, C)."""
        if self.bfloat16 == "table":
            table = table.bfloat16().double()
        h0, w0 = table.shape[:2]
        if (h, w) == (h0, w0) and not self.moves_cells:
            return table
        height = width = max(h, w)
        if not self.ar_preserving:
            height, width = h, w
        rows = self.matrix(height, h0)[:h]
        columns = self.matrix(width, w0)[:w]
        if h * w0 > h0 * w:  # first the axis after which less is left
            return torch.einsum("yh,hxc->yxc", rows, torch.einsum("xw,hwc->hxc", columns, table))
        return torch.einsum("xw,ywc->yxc", columns, torch.einsum("yh,hwc->ywc", rows, table))

    def tokens(self, table: Tensor, sizes: Grids) -> Tensor:
        """The tokens of all grids, packed (sum of t*h*w, C), of a table (H0, W0, C), float64."""
        packed = []
        for frames, h, w in sizes:
            if self.transposed in ("size", "table"):
                grid = self.grid(table, w, h)
            else:
                grid = self.grid(table, h, w)
            if self.transposed in ("order", "table"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
        return torch.cat(packed)


POSITIONS: list[dict[str, Any]] = [
    dict(half_pixel=True),
    dict(half_pixel=False, align_corners=True),
    dict(half_pixel=False),
    dict(half_pixel=True, align_corners=True),
    dict(half_pixel=False, edges=True),
]
BORDERS: list[dict[str, Any]] = [
    dict(antialias=True),
    dict(antialias=False),
    dict(antialias=False, drops_outside=True),
    dict(antialias=False, zeros_outside=True),
]
KERNELS: list[dict[str, Any]] = [
    dict(mode="bilinear", cubic_coefficient=None),
    dict(mode="bicubic", cubic_coefficient=-0.5),
    dict(mode="bicubic", cubic_coefficient=-0.75),
]


def conventions(sizes: Grids) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first."""
    resizes = [
        Convention(**position, **border, **kernel)
        for position, border, kernel in product(POSITIONS, BORDERS, KERNELS)
    ]
    resizes = [convention for convention in resizes if _is_distinct(convention)]
    merges = [m for m in (1, 2, 3, 4) if all(h % m == 0 and w % m == 0 for _, h, w in sizes)]
    choices = product(
        (None, "table", "weights"), merges, (None, "order", "size", "table"), (False, True), resizes
    )
    for rounded, merge, transposed, ar, resize in choices:
        yield replace(
            resize, bfloat16=rounded, merge=merge, transposed=transposed, ar_preserving=ar
        )


def _is_distinct(c: Convention) -> bool:
    """Whether some library can resize so, and no plainer convention does the same."""
    of_grid_sample = c.moves_cells or c.zeros_outside
    if of_grid_sample and (c.antialias or c.drops_outside or c.cubic_coefficient == -0.5):
        return False
    if c.mode == "bilinear":
        # Its taps lie outside where all weight is on the border's cell, or the position itself is.
        return not (c.drops_outside or (c.zeros_outside and c.align_corners))
    return True


class Family(NamedTuple):
    """The models that share a vision tower: how it resamples its table, and that table's side."""

    convention: Convention
    side: int


_BICUBIC = Convention("bicubic", antialias=False, cubic_coefficient=-0.75)
_BILINEAR = Convention("bilinear", antialias=False, cubic_coefficient=None)
_SIGLIP2 = Family(Convention("bilinear", cubic_coefficient=None), 16)
FAMILIES = {
    "siglip2": _SIGLIP2,  # NaFlex
    "lfm2-vl": _SIGLIP2,
    "moonvit": Family(_BICUBIC, 64),  # Kimi-VL, Kimi-K2.5
    "qwen3-vl": Family(replace(_BILINEAR, align_corners=True, half_pixel=False, merge=2), 48),
    "ovis2.5": Family(replace(_BICUBIC, merge=2), 32),
    "radio": Family(replace(_BILINEAR, ar_preserving=True), 128),
}
"""Tests compare each with the original library's own code, where it is installed."""


def example_inputs(family: str) -> dict[str, Tensor]:
    """The table (H0, W0, 8) float32 and the sizes (B, 2) that a port of this family is to resample.

    The same numbers everywhere: Python's generator, unlike PyTorch's, promises that.
    """
    side = FAMILIES[family].side
    draw = random.Random(0).random
    table = torch.tensor([2 * draw() - 1 for _ in range(side * side * 8)]).view(side, side, 8)
    return {"table": table, "sizes": torch.tensor([(12, 20), (30, 8), (4, 18)])}


def identify_resampling(
    table: Tensor, size: Any, result: Tensor
) -> list[tuple[float, dict[str, Any]]]:
    """Find the convention by which ``table`` was resampled to ``result``.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), floating point.
        size: (h, w) or, with t frames, (t, h, w); (B, 2) or (B, 3) for results packed one after the
            other. A tensor or a sequence.
        result: the tokens, (sum of t*h*w, C), or any shape with as many elements in that order; or
            padded, (B, N, C), of which each image's first t*h*w tokens are looked at.

    Returns:
        ``(error, settings)`` of every convention, the smallest error first: the largest difference,
        relative to the largest absolute value of ``result``. ``settings`` are the fields of
        :class:`Convention`. Of conventions that agree on these sizes, the plainest comes first: a
        table made larger shows nothing of antialiasing.

    Raises:
        ValueError: tensors that are not floating point, shapes that do not fit, sizes below 1,
            numbers that are not finite, a result of zeros, or a table that tells nothing: what is
            the same in every cell, every convention keeps.

    >>> from timm_naflex_fast.functional import resample_pos_embed
    >>> table = torch.randn(16, 16, 8)
    >>> result = resample_pos_embed(table, (9, 28), mode="bilinear")
    >>> error, convention = identify_resampling(table, (9, 28), result)[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    table = _read_table(table)
    wanted = torch.as_tensor(size)
    sizes = sizes_on_host(wanted[None] if wanted.ndim == 1 else wanted)
    result = _read_result(result, sizes, table.shape[-1])
    some = slice(None, None, -(-table.shape[-1] // SOME_CHANNELS))
    ranked = _ranked(conventions(sizes), table[..., some], sizes, result[:, some])
    best = _ranked([convention for _, convention in ranked[:BEST]], table, sizes, result)
    return [(error, asdict(convention)) for error, convention in best + ranked[BEST:]]


def _read_table(table: Tensor) -> Tensor:
    """The table (H0, W0, C), float64."""
    if table.ndim == 4 and len(table) == 1:
        table = table[0]
    if table.ndim != 3 or not table.is_floating_point() or not table.numel():
        found = f"{tuple(table.shape)} {table.dtype}"
        raise ValueError(f"table must be ([1,] H0, W0, C), floating point; got {found}")
    if not torch.isfinite(table).all():
        raise ValueError("table must be finite; it holds NaN or infinity")
    if (table == table[:1, :1]).all():
        raise ValueError(
            "cannot tell: the table must differ from cell to cell; it is the same everywhere"
        )
    return table.detach().cpu().double()


def _read_result(result: Tensor, sizes: Grids, channels: int) -> Tensor:
    """The tokens of all images without padding, (sum of t*h*w, C), float64."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        found = getattr(result, "dtype", type(result).__name__)
        raise ValueError(f"result must be floating point; got {found}")
    counts = [t * h * w for t, h, w in sizes]
    tokens = sum(counts)
    padded = result.ndim == 3 and len(result) == len(sizes)
    if padded and result.shape[0] * result.shape[1] > tokens:
        result = torch.cat([image[:count] for image, count in zip(result, counts)])
    if result.numel() != tokens * channels:
        found = tuple(result.shape)
        raise ValueError(
            f"result must have {tokens} tokens of {channels} channels; got shape {found}"
        )
    if not torch.isfinite(result).all():
        raise ValueError("result must be finite; it holds NaN or infinity")
    if not result.any():
        raise ValueError("result must hold embeddings; it is zero everywhere")
    return result.detach().cpu().double().reshape(tokens, channels)


def _ranked(
    tried: Iterable[Convention], table: Tensor, sizes: Grids, result: Tensor
) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    largest = result.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    ranked = []
    for convention in tried:
        difference = (result - convention.tokens(table, sizes)).abs().max()
        ranked.append(((difference / largest).item(), convention))
    return sorted(ranked, key=lambda pair: round(pair[0], DECIMALS))


def tolerance(result: Tensor) -> float:
    """The largest error that rounding explains: of float32 positions, or of a half dtype."""
    return max(2e-4, 2 * torch.finfo(result.dtype).eps)


def describe(c: Convention) -> str:
    """A convention in words, what is usual left out."""
    usual = (None, -0.5 if c.antialias else -0.75)
    parts = {
        "with antialiasing": c.antialias,
        "without antialiasing": not c.antialias,
        f"cubic coefficient {c.cubic_coefficient}": c.cubic_coefficient not in usual,
        "aligned corners": c.align_corners,
        "positions of half pixels": c.align_corners and c.half_pixel,
        "positions from edge to edge": c.edges,
        "positions without half pixels": not (c.align_corners or c.half_pixel or c.edges),
        "aspect-preserving (resized to a square, then cut)": c.ar_preserving,
        "tokens column by column": c.transposed == "order",
        "height and width exchanged": c.transposed == "size",
        "table transposed": c.transposed == "table",
        f"tokens in {c.merge} x {c.merge} blocks": c.merge > 1,
        f"{c.bfloat16} rounded to bfloat16": c.bfloat16,
        "taps outside the table dropped": c.drops_outside,
        "zeros outside the table": c.zeros_outside,
    }
    return f"{c.mode} {', '.join(part for part, holds in parts.items() if holds)}"
