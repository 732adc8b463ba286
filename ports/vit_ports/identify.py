"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table? All of them are tried, the best comes first.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .conventions import Convention, FrameSizes, conventions
from .format import Array
from .guesses import share
from .rule import Stage

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
SOME_CHANNELS = 16  # all follow the same convention, so that some of them find the best ones
BEST = 10
POSITIONS_IN_FLOAT32 = 2.0**-21
"""What float32 may move a token or channel by, for each cell of the table's longer side: positions
there are as large as the side, and each weight follows its position."""
LOWER = {
    "float16": 2**-8,
    "tf32": 2**-8,
    "bfloat16": 2**-5,
    "int8": 2**-5,
}
"""What a lower precision may move a token or channel by: four of its steps at 1. Ports that round
table, weights, products and sums come up to half of it, a table in 8 bits with one scale to 0.4."""
MUCH_NEARER = 0.5  # share of another's error; by less, rounding may make one nearer by chance
# Share of the error that a factor leaves: 0.17 of 1.02 times the result, rounded to bfloat16; 0.5 where
# bfloat16 is cut off, not rounded.
SCALED = 0.25
EXACT = 1e-9  # conventions that agree on these sizes differ by less


def identify_resampling(table: Any, size: Any, result: Any) -> list[tuple[float, dict[str, Any]]]:
    """Find the convention by which ``table`` was resampled to ``result``.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), an array.
        size: (h, w) or, with t frames, (t, h, w); (B, 2) or (B, 3) for results packed one after the
            other. An array or a sequence.
        result: the tokens, (sum of t*h*w, C), or another shape (..., C) with the tokens in that
            order; or padded, (B, N, C), of which each image's first t*h*w tokens are looked at.

    Returns:
        ``(error, settings)`` of every convention, the smallest error first: the largest difference,
        relative to the largest absolute value of ``result``. ``settings`` are the fields of
        :class:`Convention`. Of conventions that agree on these sizes, the plainest comes first: a
        table made larger shows nothing of antialiasing.

    Raises:
        ValueError: shapes that do not fit or are transposed, sizes below 1, numbers that are not
            finite. Or what tells nothing: a table that is the same in every cell, sizes that are all
            the table's own, a result of zeros.

    >>> table = np.random.default_rng(0).standard_normal((16, 16, 8))
    >>> result = Convention("bilinear", None).tokens(table, [(1, 9, 28)])
    >>> error, convention = identify_resampling(table, (9, 28), result)[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    cells, sizes, tokens = checked(table, size, result)
    ranking = ranked(cells, sizes, tokens, largest_difference)
    return [(error, convention._asdict()) for error, convention in ranking]


def checked(table: Any, size: Any, result: Any) -> tuple[Array, FrameSizes, Array]:
    """The arguments of ``identify_resampling`` as its sums take them.

    Returns:
        The table (H0, W0, C), the sizes as (t, h, w), and the tokens without padding
        (sum of t*h*w, C); arrays in float64.

    Raises:
        ValueError: as ``identify_resampling``.
    """
    cells = _float64("table", table)
    tokens = _float64("result", result)
    sizes = _sizes(size)
    counts = [t * h * w for t, h, w in sizes]
    if cells.ndim == 4 and len(cells) == 1:
        cells = cells[0]
    if tokens.ndim == 3 and len(tokens) == len(sizes):
        # It may be padded: each image's own tokens come first.
        tokens = np.concatenate([image[:count] for image, count in zip(tokens, counts)])
    tokens = tokens.reshape(-1, tokens.shape[-1])
    if cells.ndim != 3 or tokens.shape != (sum(counts), cells.shape[2]):
        raise ValueError(
            f"table must be (H0, W0, C) and result ({sum(counts)}, C), channels last; got "
            f"{cells.shape} and {tokens.shape}"
        )
    is_resampled = {(h, w) for _, h, w in sizes} != {cells.shape[:2]}
    tells = np.ptp(cells, (0, 1)).any() and tokens.any()
    if not (is_resampled and tells):
        raise ValueError(
            "nothing can be told of a table that is the same in every cell, sizes that are all the "
            "table's own, or a result of zeros"
        )
    return cells, sizes, tokens


def _sizes(given: Any) -> FrameSizes:
    """Sizes (h, w) or (t, h, w), of one grid or of several, as (t, h, w) each."""
    rows = np.atleast_2d(_float64("size", given))
    is_whole = np.all(rows >= 1) and np.all(rows % 1 == 0)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3) or not is_whole:
        raise ValueError(
            f"size must hold (h, w) or (t, h, w), whole numbers from 1; got shape {rows.shape}"
        )
    whole = rows.astype(int)
    frames = whole[:, :-2].prod(1)  # 1 where there are none
    return [(int(t), int(h), int(w)) for t, (h, w) in zip(frames, whole[:, -2:])]


def _float64(name: str, given: Any) -> Array:
    """The numbers of an array in float64."""
    numbers = np.atleast_1d(given)
    if numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must hold finite numbers")
    return numbers.astype(np.float64)


def ranked(
    table: Array, sizes: FrameSizes, tokens: Array, error_of: Callable[[Array, Array], float]
) -> list[tuple[float, Convention]]:
    """Every convention that the sizes allow, with its error, the smallest first.

    Of the best ones it is that of all channels, of the others that of those that differ most from
    cell to cell.

    Args:
        table: with sizes and tokens as ``checked`` returns them.
        sizes: see table.
        tokens: see table.
        error_of: how far tokens are from those of a convention.
    """

    def by_error(tried: Iterable[Convention], channels: Any) -> list[tuple[float, Convention]]:
        found = []
        for convention in tried:
            wanted = convention.tokens(table[..., channels], sizes)
            error = error_of(wanted, tokens[:, channels])
            found.append((error, convention))
        # Those with the same error stay in the order in which they come.
        return sorted(found, key=lambda pair: round(pair[0], DECIMALS))

    order = np.argsort(table.std((0, 1)))
    some_channels = order[-SOME_CHANNELS:]
    some = by_error(conventions(sizes), some_channels)
    best = [convention for _, convention in some[:BEST]]
    return by_error(best, slice(None)) + some[BEST:]


def largest_difference(wanted: Array, tokens: Array) -> float:
    """Relative to the largest absolute value of the tokens."""
    off = np.abs(tokens - wanted)
    return float(off.max() / np.abs(tokens).max())


def distance(wanted: Array, tokens: Array) -> float:
    """How far the worst token or channel is, as a share of it."""
    whole = {"token": 1.0, "channel": 1.0}
    stage = Stage("position_embedding", [wanted], {0: tokens}, [], whole)
    return stage.worst(0, wanted).share


def verdict(
    reference: Convention, table: Any, size: Any, result: Any, precision: str = "float32"
) -> tuple[bool, list[str]]:
    """Whether a port follows the reference; and in lines how far it and the nearest ones are.

    It does if rounding explains the difference, measured as ``compare`` measures that of a stage,
    and if no other convention is much nearer, nor a multiple of what the reference gives.

    Args:
        reference: the convention that is expected.
        table: with size and result as for ``identify_resampling``; arrays, too.
        size: see table.
        result: see table.
        precision: in which the port computes, or to which the table or the result was rounded.

    Raises:
        ValueError: as ``identify_resampling``; sizes that the reference does not allow.
    """
    cells, sizes, tokens = checked(table, size, result)
    if reference not in conventions(sizes):
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference.merge}")
    ranking = ranked(cells, sizes, tokens, distance)
    smallest, _ = ranking[0]
    float32 = POSITIONS_IN_FLOAT32 * max(cells.shape[:2])
    limit = LOWER.get(precision, float32)
    wanted = reference.tokens(cells, sizes)
    error = distance(wanted, tokens)
    factor = share(tokens, wanted)
    is_scaled = error > float32 and distance(factor * wanted, tokens) <= SCALED * error
    is_equal = error <= limit and MUCH_NEARER * error <= smallest + EXACT and not is_scaled
    coarser = [name for name in LOWER if limit < LOWER[name] and smallest <= LOWER[name]]
    if is_equal:
        first = "equal to the reference, within"
    elif is_scaled:
        first = f"{factor:.4g} times what the reference gives; that is more than"
    elif smallest <= limit:
        first = "different from the reference; the port follows another, within"
    else:
        hint = f" (if it rounds more, say --precision {coarser[0]})" if coarser else ""
        first = f"none of the known ones{hint}: the nearest is not within"
    lines = [
        f"{first} the rounding of {precision} (reference {100 * error:.3g} %, "
        f"limit {100 * limit:.3g} %). The nearest:"
    ]
    for off, convention in ranking[:3]:
        lines.append(f"{100 * off:10.3g} %  {convention.words()}")
    lines.append(f"the reference: {reference.words()}")
    as_near = sum(MUCH_NEARER * off <= smallest + EXACT for off, _ in ranking[:BEST])
    if as_near > 1 and smallest <= limit:
        lines.append(
            f"{as_near} conventions are as near; other sizes, or float32, may tell them apart"
        )
    return is_equal, lines
