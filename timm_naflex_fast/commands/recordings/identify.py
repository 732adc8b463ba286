"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table? All of them are tried, the best comes first.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...batch.layout import FrameSizes, sizes_on_host
from .conventions import Convention, conventions
from .format import PRECISIONS, Array
from .rule import Stage

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
SOME_CHANNELS = 16  # all follow the same convention, so that some of them find the best ones
BEST = 10
POSITIONS_IN_FLOAT32 = 2.0**-21
"""What float32 may move a token or channel by, for each cell of the table's longer side: positions
there are as large as the side, and each weight follows its position."""
STEPS = {"tf32": 2**-10, "float16": 2**-10, "bfloat16": 2**-7}
ROUNDED_STEPS = 4
"""What a lower precision may move a token or channel by, in its steps at 1. Ports that round table,
weights, products and sums come up to half of it."""
MUCH_NEARER = 0.5  # share of another's error; by less, rounding may make one nearer by chance
EXACT = 1e-9  # conventions that agree on these sizes differ by less
SHOWN = 3


def identify_resampling(
    table: Tensor, size: Any, result: Tensor
) -> list[tuple[float, dict[str, Any]]]:
    """Find the convention by which ``table`` was resampled to ``result``.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), floating point.
        size: (h, w) or, with t frames, (t, h, w); (B, 2) or (B, 3) for results packed one after the
            other. A tensor or a sequence.
        result: the tokens, (sum of t*h*w, C), or another shape (..., C) with the tokens in that
            order; or padded, (B, N, C), of which each image's first t*h*w tokens are looked at.

    Returns:
        ``(error, settings)`` of every convention, the smallest error first: the largest difference,
        relative to the largest absolute value of ``result``. ``settings`` are the fields of
        :class:`Convention`. Of conventions that agree on these sizes, the plainest comes first: a
        table made larger shows nothing of antialiasing.

    Raises:
        ValueError: tensors that are not floating point, shapes that do not fit or are transposed,
            sizes below 1, numbers that are not finite. Or what tells nothing: a table that is the
            same in every cell, sizes that are all the table's own, a result of zeros.

    >>> from timm_naflex_fast.functional import resample_pos_embed
    >>> table = torch.randn(16, 16, 8)
    >>> result = resample_pos_embed(table, (9, 28), mode="bilinear")
    >>> error, convention = identify_resampling(table, (9, 28), result)[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    cells, sizes, tokens = checked(table, size, result)
    ranking = []
    for error, convention in ranked(cells, sizes, tokens):
        settings = convention._asdict()
        ranking.append((error, settings))
    return ranking


def checked(table: Tensor, size: Any, result: Tensor) -> tuple[Array, FrameSizes, Array]:
    """The arguments of ``identify_resampling`` as its sums take them.

    Returns:
        The table (H0, W0, C), the sizes as (t, h, w), and the tokens without padding
        (sum of t*h*w, C); arrays in float64.

    Raises:
        ValueError: as ``identify_resampling``.
    """
    cells = _float64("table", table)
    if cells.ndim == 4 and len(cells) == 1:
        cells = cells[0]
    if cells.ndim != 3:
        raise ValueError(
            f"table must be (H0, W0, C) or (1, H0, W0, C); got {tuple(table.shape)}, so reshape it"
        )
    is_first = cells == cells[:1, :1]
    if is_first.all():
        raise ValueError(f"table must differ from cell to cell; got {cells.shape} with equal cells")
    rows = torch.as_tensor(size)
    sizes = sizes_on_host(torch.atleast_2d(rows))
    own_size = cells.shape[:2]
    is_own = [(h, w) == own_size for _, h, w in sizes]
    if all(is_own):
        raise ValueError("size must differ from the table's own, at which nothing is resampled")
    numbers = _float64("result", result)
    tokens = _packed(numbers, sizes, cells.shape)
    if not tokens.any():
        raise ValueError("result must not be zero everywhere")
    return cells, sizes, tokens


def _float64(name: str, tensor: Tensor) -> Array:
    """The tensor's numbers in float64, on the host."""
    is_right = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if is_right:
        is_finite = tensor.isfinite()
        is_right = bool(is_finite.all())
    if not is_right:
        raise ValueError(f"{name} must be a tensor of finite floating point numbers")
    on_host = tensor.detach().cpu()
    return on_host.double().numpy()


def _packed(result: Array, sizes: FrameSizes, table_shape: tuple[int, ...]) -> Array:
    """The tokens of all images without padding, (sum of t*h*w, C)."""
    shape = result.shape
    channels = table_shape[-1]
    counts = [t * h * w for t, h, w in sizes]
    total = sum(counts)
    needed = f"result must have {total} tokens of {channels} channels, shape (tokens, C)"
    if result.ndim > 1 and shape[-1] != channels:
        if channels in shape:
            raise ValueError(f"{needed}; got {shape}, which is transposed: channels come last")
        if shape[-1] == table_shape[0]:
            raise ValueError(
                f"table must be (H0, W0, C); got {table_shape}, which is transposed if {shape[-1]} "
                f"is the number of channels, as in result {shape}"
            )
    if result.ndim == 3 and len(result) == len(sizes):
        # It may be padded: each image's own tokens come first.
        images = []
        for image, count in zip(result, counts):
            images.append(image[:count])
        result = np.concatenate(images)
    if result.size != total * channels:
        raise ValueError(f"{needed}; got {shape}")
    return result.reshape(-1, channels)


def ranked(table: Array, sizes: FrameSizes, result: Array) -> list[tuple[float, Convention]]:
    """Every convention that the sizes allow, with its error, the smallest first.

    Arguments as ``checked`` returns them. All channels are compared of the best conventions, of the
    others those that differ most from cell to cell.
    """
    magnitudes = np.abs(result)
    largest = float(magnitudes.max())
    # The channels that differ most from cell to cell come last.
    spread = table.std((0, 1))  # (C,)
    order = np.argsort(spread)
    channels = order[-SOME_CHANNELS:]

    def by_error(
        tried: Iterable[Convention], table: Array, result: Array
    ) -> list[tuple[float, Convention]]:
        found = []
        for convention in tried:
            wanted = convention.tokens(table, sizes)
            off = np.abs(result - wanted)
            error = float(off.max()) / largest
            found.append((error, convention))
        # Those with the same error stay in the order in which they come.
        return sorted(found, key=lambda pair: round(pair[0], DECIMALS))

    few_of_table = table[..., channels]  # (H0, W0, some C)
    few_of_result = result[:, channels]  # (sum of t*h*w, some C)
    some = by_error(conventions(sizes), few_of_table, few_of_result)
    best = [convention for _, convention in some[:BEST]]
    best_ones = by_error(best, table, result)
    others = some[BEST:]
    return best_ones + others


def verdict(
    reference: Convention, table: Tensor, size: Any, result: Tensor, precision: str = "float32"
) -> tuple[bool, list[str]]:
    """Whether a port follows the reference; and in lines how far it and the nearest ones are.

    It does if rounding explains the difference, measured as ``compare`` measures that of a stage,
    and if no other convention is much nearer.

    Args:
        reference: the convention that is expected.
        table: with size and result as for ``identify_resampling``.
        size: see table.
        result: see table.
        precision: in which the port computes, or to which the table or the result was rounded.

    Raises:
        ValueError: as ``identify_resampling``; sizes that the reference does not allow.
    """
    cells, sizes, tokens = checked(table, size, result)
    ranking = ranked(cells, sizes, tokens)
    tried = [convention for _, convention in ranking]
    if reference not in tried:
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference.merge}")
    error = distance(reference, cells, sizes, tokens)
    nearest = by_distance(tried[:BEST], cells, sizes, tokens)
    smallest, _ = nearest[0]

    limits = {name: limit_of(name, cells) for name in PRECISIONS}
    limit = limits[precision]
    is_rounding = error <= limit
    is_near = smallest + EXACT >= MUCH_NEARER * error
    is_equal = is_rounding and is_near
    first = _conclusion(is_equal, smallest <= limit, precision)
    figures = f"reference {100 * error:.3g} %, limit {100 * limit:.3g} %"
    lines = [f"{first} ({figures}). The nearest:"]
    for off, convention in nearest[:SHOWN]:
        differences = convention.differences(reference)
        lines.append(f"{100 * off:10.3g} %  {differences}")
    lines += _wider_precision(smallest, limit, limits)
    as_near = [MUCH_NEARER * other <= smallest + EXACT for other, _ in nearest]
    count = sum(as_near)
    if count > 1:
        lines.append(
            f"{count} conventions are as near; other sizes, or float32, may tell them apart"
        )
    return is_equal, lines


def _conclusion(is_equal: bool, is_explained: bool, precision: str) -> str:
    """Whom the port follows, in words; ``is_explained``: by rounding, of the nearest convention."""
    if is_equal:
        return f"equal to the reference, within the rounding of {precision}"
    if is_explained:
        return f"different from the reference; the port follows another, within the rounding of {precision}"
    return f"none of the known ones: the nearest is not within the rounding of {precision}"


def _wider_precision(error: float, limit: float, limits: dict[str, float]) -> list[str]:
    """A line on the first precision that explains an error beyond a limit; none if none does."""
    for name in PRECISIONS:
        if limit < error <= limits[name]:
            return [f"as large as {name}'s rounding: if so, say --precision {name}"]
    return []


def by_distance(
    tried: Iterable[Convention], table: Array, sizes: FrameSizes, tokens: Array
) -> list[tuple[float, Convention]]:
    """Conventions with how far tokens are from theirs, the nearest first."""
    found = []
    for convention in tried:
        off = distance(convention, table, sizes, tokens)
        found.append((off, convention))
    # Those that are as far stay in the order in which they come.
    return sorted(found, key=lambda pair: round(pair[0], DECIMALS))


def distance(convention: Convention, table: Array, sizes: FrameSizes, tokens: Array) -> float:
    """How far tokens are from a convention's: of the worst token or channel, as a share of it."""
    wanted = convention.tokens(table, sizes)
    stage = Stage("position_embedding", [wanted], {0: tokens}, [], {})
    shares = stage.shares(0, wanted)
    return max(shares.values())


def limit_of(precision: str, table: Array) -> float:
    """What a precision may move a token or channel by, as a share of it; table (H0, W0, C)."""
    if precision in STEPS:
        step = STEPS[precision]
        return ROUNDED_STEPS * step
    longer_side = max(table.shape[:2])
    return POSITIONS_IN_FLOAT32 * longer_side
