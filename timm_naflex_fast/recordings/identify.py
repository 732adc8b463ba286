"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table? All of them are tried, the best comes first. And which rounding explains the rest?
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch.layout import FrameSizes, sizes_on_host
from .conventions import Convention, conventions
from .format import Array

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
SOME_CHANNELS = 16  # all follow the same convention, so that some of them find the best ones
BEST = 10
POSITIONS_IN_FLOAT32 = 2.0**-21
"""What float32 may move a number by, as a share of the largest, for each cell of the table's longer
side: positions there are as large as the side, and each weight follows its position."""
HALF_STEPS = 2
"""What a half dtype may move a number by, in steps of that dtype at the largest number. Ports that
round table, weights, products and sums come up to 1.8."""
LESS = 0.95
"""Where a port rounds as we do, ours is nearer to it (root mean square) than the exact result is.
By at least so much: table and weights are only a part of what it rounds."""

MUCH_NEARER = 0.5  # share of another's error; by less, rounding may make one nearer by chance
EXACT = 1e-9  # conventions that agree on these sizes differ by less
NO_GUESS = 0.1  # what is farther away tells nothing about a port
SHOWN = 3


class Rounding(NamedTuple):
    """A precision that explains how far a result is from a convention.

    Args:
        precision: "float32", "float16", "bfloat16", or for example "float32 with the table in
            bfloat16".
        error: the largest difference, as a share of the result's largest absolute value; what is
            left of it where ours are rounded as well, for example the table.
        limit: the largest error that this precision explains.
    """

    precision: str
    error: float
    limit: float

    def words(self) -> str:
        """How it explains the difference, with the numbers that decide.

        >>> Rounding("float16", 0.0004, 2**-9).words()
        'within the rounding of float16: 0.04 % of the largest value (limit 0.195 %)'
        """
        limit = f"(limit {100 * self.limit:.3g} %)"
        return f"within the rounding of {self.precision}: {_percent(self.error)} {limit}"


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


def checked(table: Tensor, size: Any, result: Tensor) -> tuple[Tensor, FrameSizes, Tensor]:
    """The arguments of ``identify_resampling`` as its sums take them.

    Returns:
        The table (H0, W0, C), the sizes as (t, h, w), and the tokens without padding
        (sum of t*h*w, C); tensors in float64, on the host.

    Raises:
        ValueError: as ``identify_resampling``.
    """
    table = _float64("table", table)
    shape = tuple(table.shape)
    if table.ndim == 4:
        table = table.squeeze(0)
    if table.ndim != 3:
        raise ValueError(f"table must be (H0, W0, C) or (1, H0, W0, C); got {shape}, so reshape it")
    if (table == table[:1, :1]).all():
        raise ValueError(f"table must differ from cell to cell; got {shape} with equal cells")
    sizes = sizes_on_host(torch.atleast_2d(torch.as_tensor(size)))
    if all((h, w) == table.shape[:2] for _, h, w in sizes):
        raise ValueError("size must differ from the table's own, at which nothing is resampled")
    result = _packed(_float64("result", result), sizes, table.shape)
    if not result.any():
        raise ValueError("result must not be zero everywhere")
    return table, sizes, result


def _float64(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float64, on the host."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if not is_float or not tensor.isfinite().all():
        raise ValueError(f"{name} must be a tensor of finite floating point numbers")
    return tensor.detach().cpu().double()


def _packed(result: Tensor, sizes: FrameSizes, table_shape: torch.Size) -> Tensor:
    """The tokens of all images without padding, (sum of t*h*w, C)."""
    shape = tuple(result.shape)
    channels = table_shape[-1]
    counts = [t * h * w for t, h, w in sizes]
    needed = f"result must have {sum(counts)} tokens of {channels} channels, shape (tokens, C)"
    channels_elsewhere = result.ndim > 1 and shape[-1] != channels
    if channels_elsewhere and channels in shape:
        raise ValueError(f"{needed}; got {shape}, which is transposed: channels come last")
    if channels_elsewhere and shape[-1] == table_shape[0]:
        raise ValueError(
            f"table must be (H0, W0, C); got {tuple(table_shape)}, which is transposed if "
            f"{shape[-1]} is the number of channels, as in result {shape}"
        )
    if result.ndim == 3 and len(result) == len(sizes):
        result = torch.cat([image[:count] for image, count in zip(result, counts)])
    if result.numel() != sum(counts) * channels:
        raise ValueError(f"{needed}; got {shape}")
    return result.reshape(-1, channels)


def ranked(table: Tensor, sizes: FrameSizes, result: Tensor) -> list[tuple[float, Convention]]:
    """Every convention that the sizes allow, with its error, the smallest first.

    Arguments as ``checked`` returns them. All channels are compared of the best conventions, of the
    others those that differ most from cell to cell.
    """
    largest = result.abs().max()
    spread = table.flatten(0, 1).std(0)  # (C,)
    channels = spread.topk(min(SOME_CHANNELS, len(spread))).indices
    tried = conventions(sizes)
    some = _by_error(tried, table[..., channels], sizes, result[:, channels], largest)
    tried = (convention for _, convention in some[:BEST])
    return _by_error(tried, table, sizes, result, largest) + some[BEST:]


def tokens_of(
    convention: Convention,
    table: Tensor,
    sizes: FrameSizes,
    weights_in: torch.dtype = torch.float64,
) -> Tensor:
    """``Convention.tokens`` of a tensor; ``weights_in`` is the dtype to which weights are rounded."""

    def rounded(weights: Array) -> Array:
        return torch.from_numpy(weights).to(weights_in).double().numpy()

    return torch.from_numpy(convention.tokens(table.numpy(), sizes, rounded))


def _by_error(
    tried: Iterator[Convention], table: Tensor, sizes: FrameSizes, result: Tensor, largest: Tensor
) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    found = []
    for convention in tried:
        error = _share(result - tokens_of(convention, table, sizes), largest)
        found.append((error, convention))
    return sorted(found, key=lambda pair: round(pair[0], DECIMALS))


def _share(difference: Tensor, largest: Tensor) -> float:
    """The largest difference, as a share of the result's largest absolute value."""
    return (difference.abs().max() / largest).item()


def rounding(
    convention: Convention,
    table: Tensor,
    sizes: FrameSizes,
    result: Tensor,
    stored_in: torch.dtype = torch.float64,
) -> Rounding | None:
    """The precision whose rounding explains how far a result is from a convention.

    A half dtype explains it only where there is a sign of it: the table is stored in it; all
    numbers of the result are numbers of that dtype; or to round table or weights brings ours nearer
    to the result. So a port that computes in float32 with an error of 0.3 % is not called right.

    Args:
        convention: what the result is compared with.
        table: with sizes and result as ``checked`` returns them.
        sizes: see table.
        result: see table.
        stored_in: the dtype in which the table was given.

    Returns:
        That precision, or None where none of the three explains it.
    """
    largest = result.abs().max()
    exact = tokens_of(convention, table, sizes)
    error = _share(result - exact, largest)
    float32_limit = POSITIONS_IN_FLOAT32 * max(table.shape[:2])
    if error <= float32_limit:
        return Rounding("float32", error, float32_limit)
    # What bfloat16 can hold, float16 can hold as well, so bfloat16 is looked for first.
    for dtype, precision in [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]:
        limit = HALF_STEPS * torch.finfo(dtype).eps
        if error > limit:
            continue
        rounded_table = table.to(dtype).double()
        simulated = {
            "the table": tokens_of(convention, rounded_table, sizes),
            "the weights": tokens_of(convention, table, sizes, weights_in=dtype),
            "table and weights": tokens_of(convention, rounded_table, sizes, weights_in=dtype),
        }
        for rounded, tokens in simulated.items():
            left = _share(result - tokens, largest)
            if left <= float32_limit:
                return Rounding(f"float32 with {rounded} in {precision}", left, float32_limit)
        nearest = min((result - tokens).square().mean() for tokens in simulated.values())
        is_nearer = nearest < LESS**2 * (result - exact).square().mean()
        is_result_rounded = (result.to(dtype) == result).all()
        if is_nearer or is_result_rounded or stored_in == dtype:
            return Rounding(precision, error, limit)
    return None


def verdict(
    reference: Convention, table: Tensor, size: Any, result: Tensor
) -> tuple[bool, list[str]]:
    """Whether a port follows the reference; and in lines how far it and the nearest ones are.

    It does if rounding explains the difference, and if no other convention is much nearer.

    Args:
        reference: the convention that is expected.
        table: with size and result as for ``identify_resampling``.
        size: see table.
        result: see table.

    Raises:
        ValueError: as ``identify_resampling``; sizes that the reference does not allow.
    """
    given = checked(table, size, result)
    ranking = ranked(*given)
    if all(convention != reference for _, convention in ranking):
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference.merge}")
    smallest, best = ranking[0]
    table_in, sizes, tokens = given
    error = _share(tokens - tokens_of(reference, table_in, sizes), tokens.abs().max())
    explained = rounding(reference, *given, stored_in=table.dtype)
    if explained and smallest + EXACT >= MUCH_NEARER * error:
        first = f"equal to the reference, {explained.words()}. The nearest:"
        return True, [first, *_lines(ranking[:SHOWN], reference), *_as_near(ranking, error)]
    explained = rounding(best, *given, stored_in=table.dtype)
    if explained:
        first = f"different from the reference: {_percent(error)}. The port follows another,"
        lines = _lines(ranking[:SHOWN], reference)
        return False, [f"{first} {explained.words()}:", *lines, *_as_near(ranking, smallest)]
    first = f"none of the known ones: the nearest is {_percent(smallest)} away, not by rounding"
    if smallest > NO_GUESS:
        return False, [first, *_lines([(error, reference)], reference)]
    return False, [f"{first}. The nearest:", *_lines(ranking[:SHOWN], reference)]


def _percent(error: float) -> str:
    return f"{100 * error:.3g} % of the largest value"


def _lines(found: list[tuple[float, Convention]], reference: Convention) -> list[str]:
    """How far each convention is, and how it differs from the reference."""
    lines = []
    for error, convention in found:
        lines.append(f"{100 * error:10.3g} %  {convention.differences(reference)}")
    return lines


def _as_near(ranking: list[tuple[float, Convention]], error: float) -> list[str]:
    """A line about the conventions that these sizes and numbers do not tell apart."""
    count = sum(MUCH_NEARER * other <= error + EXACT for other, _ in ranking)
    if count == 1:
        return []
    return [f"{count} conventions are as near; other sizes, or float32, may tell them apart"]
