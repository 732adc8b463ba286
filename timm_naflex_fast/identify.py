"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table?

All of them are tried, the best comes first.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers
them all. This file writes the formula out and does not read it off ``F.interpolate``, which has no
other cubic coefficient and no other positions. Nor does ``closed_form`` have them, whose positions
are rounded as PyTorch rounds them.
"""

import math
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

    def matrix(self, n: int, n0: int, keep: int) -> Tensor:
        """The first ``keep`` rows of ``A_n`` (n, n0), float64, sparse: its memory follows n + n0,
        not n * n0."""
        # Positions are (to + offset) * cells / gaps - shift, on an axis whose cell i lies at i.
        both = self.align_corners and self.half_pixel
        cells = n0 - 1 if self.align_corners else n0
        gaps = n - 1 if self.edges or (self.align_corners and not both) else n
        # PyTorch's centres with antialiasing are those of half pixels, whatever align_corners says.
        offset = 0.5 if self.half_pixel or (self.antialias and self.align_corners) else 0.0
        shift = 0.5 if self.edges or (offset and not both) else 0.0
        scale = cells / gaps if gaps else 0.0
        centre = (
            scale * (torch.arange(keep, dtype=torch.float64)[:, None] + offset) - shift
        )  # (keep, 1)
        stretch = max(scale, 1.0) if self.antialias else 1.0
        taps = centre.floor() + torch.arange(
            -math.ceil(2 * stretch), math.ceil(2 * stretch) + 2
        )  # (keep, taps)
        distance = (taps - centre).abs() / stretch
        cubic = self.cubic_coefficient
        weights = (1 - distance).clamp(min=0) if cubic is None else cubic_kernel(distance, cubic)
        if (
            self.antialias or self.drops_outside or self.zeros_outside
        ):  # else a tap outside takes the border's value
            weights = weights * ((taps >= 0) & (taps < n0))
        if (
            self.antialias or self.drops_outside
        ):  # the weights that are left are scaled to a sum of 1
            weights = weights / weights.sum(1, keepdim=True)
        index = torch.stack(
            (torch.arange(keep)[:, None].expand_as(taps), taps.long().clamp(0, n0 - 1))
        ).flatten(1)
        matrix = torch.sparse_coo_tensor(
            index, weights.flatten(), (keep, n0), check_invariants=False
        ).coalesce()
        if self.bfloat16 == "weights":
            matrix.values().copy_(matrix.values().bfloat16())
        return matrix

    def grid(self, table: Tensor, h: int, w: int) -> Tensor:
        """The table (H0, W0, C), float64, resampled to (h, w, C); a table of that size is not
        changed."""
        rows, cols = table.shape[:2]
        table = table.bfloat16().double() if self.bfloat16 == "table" else table
        if (h, w) == (rows, cols) and not (self.edges or (self.align_corners and self.half_pixel)):
            return table
        height, width = (max(h, w),) * 2 if self.ar_preserving else (h, w)
        if h * cols > rows * w:  # first the axis after which less is left
            table = self._resize(table.transpose(0, 1), width, w).transpose(0, 1)
            return self._resize(table, height, h)
        table = self._resize(table, height, h)
        return self._resize(table.transpose(0, 1), width, w).transpose(0, 1)

    def _resize(self, table: Tensor, n: int, keep: int) -> Tensor:
        """The first axis of (n0, m, C), resized to n, of which the first ``keep`` remain."""
        return (self.matrix(n, len(table), keep) @ table.flatten(1)).unflatten(1, table.shape[1:])

    def tokens(self, table: Tensor, sizes: Grids) -> Tensor:
        """The tokens of all grids, packed (sum of t*h*w, C), float64, of a table (H0, W0, C) in
        float64."""
        packed = []
        for frames, h, w in sizes:
            grid = (
                self.grid(table, w, h)
                if self.transposed in ("size", "table")
                else self.grid(table, h, w)
            )
            if self.transposed in ("order", "table"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
        return torch.cat(packed)


def conventions(sizes: Grids) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first."""
    merges = [m for m in (1, 2, 3, 4) if all(h % m == 0 and w % m == 0 for _, h, w in sizes)]
    choices = product(
        (None, "table", "weights"),
        merges,
        (None, "order", "size", "table"),
        (False, True),
        [(False, True), (True, False), (False, False), (True, True), (False, None)],
        [(True, None), (False, None), (False, "drops"), (False, "zeros")],
        [("bilinear", None), ("bicubic", -0.5), ("bicubic", -0.75)],
    )
    for rounded, merge, transposed, ar, (corners, half), (antialias, outside), (
        mode,
        coefficient,
    ) in choices:
        of_grid_sample = (
            half is None or (corners and half) or outside == "zeros"
        )  # it has one cubic coefficient
        if of_grid_sample and (antialias or outside == "drops" or coefficient == -0.5):
            continue
        # Bilinear taps lie outside where all weight is on the border's cell, or where the position
        # itself does.
        if mode == "bilinear" and outside and (outside == "drops" or corners):
            continue
        plain = Convention(
            mode, antialias, corners, bool(half), ar, coefficient, transposed, merge, rounded
        )
        yield replace(
            plain,
            drops_outside=outside == "drops",
            zeros_outside=outside == "zeros",
            edges=half is None,
        )


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

    Raises:
        ValueError: an unknown family; names those that there are.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is not known; valid: {', '.join(FAMILIES)}")
    side, draw = FAMILIES[family].side, random.Random(0).random
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
    >>> error, convention = identify_resampling(table, (9, 28), resample_pos_embed(table, (9, 28), mode="bilinear"))[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    table = table[0] if table.ndim == 4 and len(table) == 1 else table
    if table.ndim != 3 or not table.is_floating_point() or not table.numel():
        raise ValueError(
            f"table must be ([1,] H0, W0, C), floating point; got {tuple(table.shape)} {table.dtype}"
        )
    table = table.detach().cpu().double()
    wanted = torch.as_tensor(size)
    sizes = sizes_on_host(wanted[None] if wanted.ndim == 1 else wanted)
    tokens, channels = sum(t * h * w for t, h, w in sizes), table.shape[-1]
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise ValueError(
            f"result must be floating point; got {getattr(result, 'dtype', type(result).__name__)}"
        )
    if result.ndim == 3 and len(result) == len(sizes) and result.shape[1] * len(sizes) > tokens:
        result = torch.cat([image[: t * h * w] for image, (t, h, w) in zip(result, sizes)])
    if result.numel() != tokens * channels:
        raise ValueError(
            f"result must have {tokens} tokens of {channels} channels; got shape {tuple(result.shape)}"
        )
    if not (torch.isfinite(table).all() and torch.isfinite(result).all()):
        raise ValueError("table and result must be finite; they hold NaN or infinity")
    if not result.any():
        raise ValueError("result must hold embeddings; it is zero everywhere")
    if (table == table[:1, :1]).all():
        raise ValueError(
            "cannot tell: the table must differ from cell to cell; it is the same everywhere"
        )
    result = result.detach().cpu().double().reshape(tokens, channels)
    some = slice(
        None, None, -(-channels // 32)
    )  # every channel follows the same convention: 32 find the best ten
    ranked = _ranked(conventions(sizes), table[..., some], sizes, result[:, some])
    best = _ranked((convention for _, convention in ranked[:10]), table, sizes, result)
    return [(error, asdict(convention)) for error, convention in best + ranked[10:]]


def _ranked(
    tried: Iterable[Convention], table: Tensor, sizes: Grids, result: Tensor
) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    largest = result.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    ranked = [(((result - c.tokens(table, sizes)).abs().max() / largest).item(), c) for c in tried]
    return sorted(ranked, key=lambda pair: round(pair[0], DECIMALS))


def tolerance(result: Tensor) -> float:
    """The largest error that rounding explains: of positions in float32, or of the result to a half
    dtype."""
    return max(2e-4, 2 * torch.finfo(result.dtype).eps)


def describe(convention: Convention) -> str:
    """A convention in words, what is usual left out."""
    c = convention
    exchanged = {
        "order": "tokens column by column",
        "size": "height and width exchanged",
        "table": "table transposed",
    }
    parts = {
        "with antialiasing" if c.antialias else "without antialiasing": True,
        f"cubic coefficient {c.cubic_coefficient}": c.cubic_coefficient
        not in (None, -0.5 if c.antialias else -0.75),
        "aligned corners": c.align_corners,
        "positions of half pixels": c.align_corners and c.half_pixel,
        "positions from edge to edge": c.edges,
        "positions without half pixels": not (c.align_corners or c.half_pixel or c.edges),
        "aspect-preserving (resized to a square, then cut)": c.ar_preserving,
        exchanged.get(c.transposed or "", ""): c.transposed,
        f"tokens in {c.merge} x {c.merge} blocks": c.merge > 1,
        f"{c.bfloat16} rounded to bfloat16": c.bfloat16,
        "taps outside the table dropped": c.drops_outside,
        "zeros outside the table": c.zeros_outside,
    }
    return f"{c.mode} {', '.join(part for part, holds in parts.items() if holds)}"
