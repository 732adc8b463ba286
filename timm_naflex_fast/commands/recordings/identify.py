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
    ranking = ranked(*checked(table, size, result))
    return [(error, convention._asdict()) for error, convention in ranking]


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
    if (cells == cells[:1, :1]).all():
        raise ValueError(f"table must differ from cell to cell; got {cells.shape} with equal cells")
    sizes = sizes_on_host(torch.atleast_2d(torch.as_tensor(size)))
    if all((h, w) == cells.shape[:2] for _, h, w in sizes):
        raise ValueError("size must differ from the table's own, at which nothing is resampled")
    tokens = _packed(_float64("result", result), sizes, cells.shape)
    if not tokens.any():
        raise ValueError("result must not be zero everywhere")
    return cells, sizes, tokens


def _float64(name: str, tensor: Tensor) -> Array:
    """The tensor's numbers in float64, on the host."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if not is_float or not tensor.isfinite().all():
        raise ValueError(f"{name} must be a tensor of finite floating point numbers")
    return tensor.detach().cpu().double().numpy()


def _packed(result: Array, sizes: FrameSizes, table_shape: tuple[int, ...]) -> Array:
    """The tokens of all images without padding, (sum of t*h*w, C)."""
    shape = result.shape
    channels = table_shape[-1]
    counts = [t * h * w for t, h, w in sizes]
    needed = f"result must have {sum(counts)} tokens of {channels} channels, shape (tokens, C)"
    if result.ndim > 1 and shape[-1] != channels:
        if channels in shape:
            raise ValueError(f"{needed}; got {shape}, which is transposed: channels come last")
        if shape[-1] == table_shape[0]:
            raise ValueError(
                f"table must be (H0, W0, C); got {table_shape}, which is transposed if {shape[-1]} "
                f"is the number of channels, as in result {shape}"
            )
    if result.ndim == 3 and len(result) == len(sizes):
        result = np.concatenate([image[:count] for image, count in zip(result, counts)])
    if result.size != sum(counts) * channels:
        raise ValueError(f"{needed}; got {shape}")
    return result.reshape(-1, channels)


def ranked(table: Array, sizes: FrameSizes, result: Array) -> list[tuple[float, Convention]]:
    """Every convention that the sizes allow, with its error, the smallest first.

    Arguments as ``checked`` returns them. All channels are compared of the best conventions, of the
    others those that differ most from cell to cell.
    """
    largest = float(np.abs(result).max())
    channels = np.argsort(table.std((0, 1)))[-SOME_CHANNELS:]

    def by_error(
        tried: Iterable[Convention], table: Array, result: Array
    ) -> list[tuple[float, Convention]]:
        found = []
        for convention in tried:
            off = np.abs(result - convention.tokens(table, sizes))
            found.append((float(off.max()) / largest, convention))
        # Those with the same error stay in the order in which they come.
        return sorted(found, key=lambda pair: round(pair[0], DECIMALS))

    some = by_error(conventions(sizes), table[..., channels], result[:, channels])
    best = [convention for _, convention in some[:BEST]]
    return by_error(best, table, result) + some[BEST:]


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
    tried = [convention for _, convention in ranked(cells, sizes, tokens)]
    if reference not in tried:
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference.merge}")
    error = distance(reference, cells, sizes, tokens)
    nearest = [(distance(one, cells, sizes, tokens), one) for one in tried[:BEST]]
    nearest.sort(key=lambda pair: round(pair[0], DECIMALS))
    smallest, _ = nearest[0]

    limits = {name: limit_of(name, cells) for name in PRECISIONS}
    limit = limits[precision]
    is_equal = error <= limit and smallest + EXACT >= MUCH_NEARER * error
    if is_equal:
        first = f"equal to the reference, within the rounding of {precision}"
    elif smallest <= limit:
        first = f"different from the reference; the port follows another, within the rounding of {precision}"
    else:
        first = f"none of the known ones: the nearest is not within the rounding of {precision}"
    lines = [f"{first} (reference {100 * error:.3g} %, limit {100 * limit:.3g} %). The nearest:"]
    for off, convention in nearest[:SHOWN]:
        lines.append(f"{100 * off:10.3g} %  {convention.differences(reference)}")
    wider = [name for name in PRECISIONS if limit < smallest <= limits[name]]
    if wider:
        lines.append(f"as large as {wider[0]}'s rounding: if so, say --precision {wider[0]}")
    as_near = sum(MUCH_NEARER * other <= smallest + EXACT for other, _ in nearest)
    if as_near > 1:
        lines.append(
            f"{as_near} conventions are as near; other sizes, or float32, may tell them apart"
        )
    return is_equal, lines


def distance(convention: Convention, table: Array, sizes: FrameSizes, tokens: Array) -> float:
    """How far tokens are from a convention's: of the worst token or channel, as a share of it."""
    wanted = convention.tokens(table, sizes)
    stage = Stage("position_embedding", [wanted], {0: tokens}, [], {})
    return max(stage.shares(0, wanted).values())


def limit_of(precision: str, table: Array) -> float:
    """What a precision may move a token or channel by, as a share of it; table (H0, W0, C)."""
    if precision in STEPS:
        return ROUNDED_STEPS * STEPS[precision]
    return POSITIONS_IN_FLOAT32 * max(table.shape[:2])
