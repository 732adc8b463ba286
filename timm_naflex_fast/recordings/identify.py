"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table? All of them are tried, the best comes first.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..batch.layout import FrameSizes, sizes_on_host
from .conventions import Convention, conventions

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
SOME_CHANNELS = 32  # all follow the same convention, so that some of them find the best ones
BEST = 10


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
            numbers that are not finite, or a table that tells nothing: what is the same in every
            cell, every convention keeps.

    >>> from timm_naflex_fast.functional import resample_pos_embed
    >>> table = torch.randn(16, 16, 8)
    >>> result = resample_pos_embed(table, (9, 28), mode="bilinear")
    >>> error, convention = identify_resampling(table, (9, 28), result)[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    table = _float64("table", table)
    if table.ndim == 4:
        table = table.squeeze(0)
    if table.ndim != 3 or (table == table[:1, :1]).all():
        raise ValueError(
            f"table must be ([1,] H0, W0, C) and differ from cell to cell; got {tuple(table.shape)}"
        )
    sizes = sizes_on_host(torch.atleast_2d(torch.as_tensor(size)))
    result = _packed(_float64("result", result), sizes, table.shape[-1])
    some = result[:, :SOME_CHANNELS]
    ranked = _ranked(conventions(sizes), table[..., :SOME_CHANNELS], sizes, some)
    best = _ranked([convention for _, convention in ranked[:BEST]], table, sizes, result)
    return [(error, convention._asdict()) for error, convention in best + ranked[BEST:]]


def _float64(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float64, on the host."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if not is_float or not tensor.isfinite().all():
        raise ValueError(f"{name} must be a tensor of finite floating point numbers")
    return tensor.detach().cpu().double()


def _packed(result: Tensor, sizes: FrameSizes, channels: int) -> Tensor:
    """The tokens of all images without padding, (sum of t*h*w, C)."""
    counts = [t * h * w for t, h, w in sizes]
    if result.ndim == 3 and len(result) == len(sizes):
        result = torch.cat([image[:count] for image, count in zip(result, counts)])
    if result.numel() != sum(counts) * channels:
        raise ValueError(
            f"result must have {sum(counts)} tokens of {channels} channels; got shape "
            f"{tuple(result.shape)}"
        )
    return result.reshape(-1, channels)


def _ranked(
    tried: Iterable[Convention], table: Tensor, sizes: FrameSizes, result: Tensor
) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    largest = result.abs().max()
    ranked = []
    for convention in tried:
        error = (result - convention.tokens(table, sizes)).abs().max() / largest
        ranked.append((error.item(), convention))
    return sorted(ranked, key=lambda pair: round(pair[0], DECIMALS))
