"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table? All of them are tried, the best comes first.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...batch.layout import FrameSizes, sizes_on_host
from .conventions import Convention, conventions

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
SOME_CHANNELS = 16  # all follow the same convention, so that some of them find the best ones
BEST = 10
POSITIONS_IN_FLOAT32 = 2.0**-21
"""What float32 may move a number by, as a share of the largest, for each cell of the table's longer
side: positions there are as large as the side, and each weight follows its position."""
HALF_STEPS = 2
"""What a half dtype may move a number by, in steps of that dtype at the largest number. Ports that
round table, weights, products and sums come up to 1.8."""
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MUCH_NEARER = 0.5  # share of another's error; by less, rounding may make one nearer by chance
EXACT = 1e-9  # conventions that agree on these sizes differ by less
NO_GUESS = 0.1  # what is farther away tells nothing about a port
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


def tokens_of(convention: Convention, table: Tensor, sizes: FrameSizes) -> Tensor:
    """``Convention.tokens`` of a tensor."""
    return torch.from_numpy(convention.tokens(table.numpy(), sizes))


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


def rounding_of(table: Tensor, result: Tensor, dtype: str | None = None) -> tuple[str, float]:
    """The precision of a port, and the largest error that it explains.

    It is ``dtype`` or, without it, the smallest in which the table or the result is stored.
    """
    for name, half in HALF.items():
        if dtype == name or (dtype is None and half in (table.dtype, result.dtype)):
            return name, HALF_STEPS * torch.finfo(half).eps
    height, width, _ = table.shape[-3:]
    return "float32", POSITIONS_IN_FLOAT32 * max(height, width)


def verdict(
    reference: Convention, table: Tensor, size: Any, result: Tensor, dtype: str | None = None
) -> tuple[bool, list[str]]:
    """Whether a port follows the reference; and in lines how far it and the nearest ones are.

    It does if rounding explains the difference, and if no other convention is much nearer.

    Args:
        reference: the convention that is expected.
        table: with size and result as for ``identify_resampling``.
        size: see table.
        result: see table.
        dtype: in which the port computes, if that is not the dtype of the table or the result.

    Raises:
        ValueError: as ``identify_resampling``; sizes that the reference does not allow.
    """
    given, sizes, tokens = checked(table, size, result)
    ranking = ranked(given, sizes, tokens)
    if all(convention != reference for _, convention in ranking):
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference.merge}")
    precision, limit = rounding_of(table, result, dtype)
    error = _share(tokens - tokens_of(reference, given, sizes), tokens.abs().max())
    smallest, _ = ranking[0]
    is_equal = error <= limit and smallest + EXACT >= MUCH_NEARER * error
    if is_equal:
        first = f"equal to the reference, within the rounding of {precision}"
    elif smallest <= limit:
        first = f"different from the reference; the port follows another, within the rounding of {precision}"
    else:
        first = f"none of the known ones: the nearest is not within the rounding of {precision}"
    lines = [f"{first} (reference {_percent(error)}, limit {_percent(limit)}). The nearest:"]
    for off, convention in ranking[:SHOWN]:
        lines.append(f"{100 * off:10.3g} %  {convention.differences(reference)}")
    as_near = sum(MUCH_NEARER * other <= smallest + EXACT for other, _ in ranking)
    if as_near > 1:
        lines.append(
            f"{as_near} conventions are as near; other sizes, or float32, may tell them apart"
        )
    return is_equal, lines


def _percent(error: float) -> str:
    return f"{100 * error:.3g} % of the largest value"
