"""The rotary embeddings of a batch, by the computation that costs less."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..batch.grids import read_grids, whole_numbers
from .embeds import EmbedFn, per_cell, per_token
from .modules import Rope


def batched_rope(
    rope: Rope, patch_coord: Tensor, dtype: torch.dtype, *, traceable: bool = False
) -> Tensor | Iterable[Tensor]:
    """What timm's ``NaFlexVit._generate_rope_naflex`` returns, without a loop over samples.

    Args:
        rope: the module's settings, from :func:`read_rope`.
        patch_coord: (B, N, 2) coordinates (y, x) of the patch tokens, in any number dtype. A
            sample's grid is its largest coordinate + 1; tokens after its h*w are padding, whose
            coordinates are not looked at.
        dtype: of the result. Angles, sines and cosines are computed in float32 at least, under
            autocast too.
        traceable: use only operations that a graph can hold and autograd can differentiate; read
            nothing back.

    Returns:
        (B, 1, N, 2D), D the head's width: sines, then cosines, zeros at padding. For mixed rotary
        embeddings (B, heads, N, 2D), one per block, each made when it is asked for; under
        ``torch.compile`` a list of them.

    Raises:
        ValueError: a negative, non-finite or huge coordinate of a token that is no padding. Not
            checked with ``traceable``, nor on a GPU where nothing is read back.

    Source: ``timm.models.naflexvit.NaFlexVit._generate_rope_naflex``.
    """
    if traceable:
        embed = per_token(rope, patch_coord.detach().to(torch.int64), dtype)
    else:
        embed = _cheaper(rope, whole_numbers(patch_coord), dtype)
    if not rope.mixed:
        return embed(None)
    blocks = range(rope.frequencies.shape[1])
    if torch.compiler.is_dynamo_compiling():  # it reads no generator of an older torch
        return [embed(block) for block in blocks]
    return (embed(block) for block in blocks)


def _cheaper(rope: Rope, coord: Tensor, dtype: torch.dtype) -> EmbedFn:
    """``per_token`` or ``per_cell`` for the tokens (B, N, 2), int64, outside graphs."""
    batch, length, _ = coord.shape
    if coord.numel() == 0:
        return per_token(rope, coord, dtype)
    if coord.device.type != "cpu" and not rope.mixed:
        return per_token(rope, coord, dtype)  # on a GPU sines are free, and host reads are not

    heights, widths, *_ = read_grids(coord)
    sizes = list(zip(heights, widths))
    has_padding = any(h * w < length for h, w in sizes)
    if rope.grid_independent:  # one grid that holds all others will do
        sizes = [(max(heights), max(widths))] * batch

    # To save sines pays if many tokens share a cell: a lookup costs half of what the formula does.
    # One huge coordinate makes a huge grid; there the formula serves, too.
    cell_count = sum(h * w for h, w in set(sizes))
    if 2 * cell_count > batch * length:
        return per_token(rope, coord, dtype, has_padding=has_padding)
    return per_cell(rope, coord, dtype, sizes)
