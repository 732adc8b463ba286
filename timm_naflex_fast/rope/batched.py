"""The rotary embeddings of a batch, by whichever computation costs least."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..resampling.grids import whole_numbers
from .embeds import EmbedFn, by_cell, by_line, by_token
from .grids import grids_on_host
from .settings import Rope

FEW_TOKENS = 1024


class MixedEmbeddings:
    """The embeddings (B, heads, N, 2D) of all blocks in turn; every loop over them computes them again."""

    def __init__(self, rope: Rope, embed: EmbedFn) -> None:
        self.depth, self.embed = rope.frequencies.shape[1], embed

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.embed, range(self.depth))


def too_many(cell_count: int, tokens: int) -> bool:
    """Whether all ``cell_count`` cells of the grids could take memory out of proportion to the ``tokens``."""
    return cell_count > max(16 * tokens, 4096)


def batched_rope(
    rope: Rope, patch_coord: Tensor, dtype: torch.dtype, *, in_graph: bool = False
) -> Tensor | MixedEmbeddings | list[Tensor]:
    """What timm's ``NaFlexVit._generate_rope_naflex`` returns, without a loop over samples.

    Args:
        rope: the module's settings, from :func:`read_rope`.
        patch_coord: (B, N, 2) coordinates (y, x) of the patch tokens, in any number dtype. A sample's grid is its
            largest coordinate + 1; tokens after its h*w are padding, whose coordinates are not looked at.
        dtype: of the result. Angles, sines and cosines are computed in float32 at least, under autocast too.
        in_graph: use only operations that a graph can hold and autograd can differentiate; read nothing back.

    Returns:
        (B, 1, N, 2D), D the head's width: sines, then cosines, zeros at padding. For mixed rotary embeddings an
        iterable of (B, heads, N, 2D), one per block.

    Raises:
        ValueError: a negative, non-finite or huge coordinate of a token that is no padding. Not checked with
            ``in_graph``, nor on a GPU where nothing is read back.

    Source: ``timm.models.naflexvit.NaFlexVit._generate_rope_naflex``.
    """
    if in_graph:
        embed = by_token(rope, patch_coord.detach().to(torch.int64), dtype)
        return list(MixedEmbeddings(rope, embed)) if rope.mixed else embed(None)
    coord = whole_numbers(patch_coord)
    tokens, fixed = coord.shape[0] * coord.shape[1], rope.augment is None
    if tokens == 0 or (coord.is_cuda and fixed and not rope.mixed):
        embed = by_token(rope, coord, dtype)  # on a GPU sines are free and host reads are not
    else:
        grids = grids_on_host(coord, one=rope.grid_independent)
        # The formula also serves where saving sines does not pay: one sample has each cell once; few tokens need few
        # operations; one huge coordinate would make a huge grid.
        few = len(coord) == 1 if rope.mixed else tokens <= FEW_TOKENS
        by_formula = (few and fixed) or too_many(grids.cell_count, tokens)
        compute = by_token if by_formula else by_cell if rope.mixed or rope.grid_independent else by_line
        embed = compute(rope, coord, dtype, grids)
    return MixedEmbeddings(rope, embed) if rope.mixed else embed(None)
