"""The rotary embeddings of a batch, by whichever computation costs least."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..batch.grids import read_grids, whole_numbers
from .embeds import EmbedFn, per_cell, per_token
from .modules import Rope

FEW_TOKENS = 1024


class MixedEmbeddings(Iterator[Tensor]):
    """The embeddings (B, heads, N, 2D) of all blocks in turn; every loop over them starts with the
    first block."""

    def __init__(self, depth: int, embed: EmbedFn) -> None:
        self.depth, self.embed = depth, embed
        self.blocks = iter(range(depth))

    def __iter__(self) -> "MixedEmbeddings":
        self.blocks = iter(range(self.depth))
        return self

    def __next__(self) -> Tensor:
        return self.embed(next(self.blocks))


def batched_rope(
    rope: Rope, patch_coord: Tensor, dtype: torch.dtype, *, traceable: bool = False
) -> Tensor | MixedEmbeddings | list[Tensor]:
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
        embeddings an iterator of (B, heads, N, 2D), one per block; under ``torch.compile`` a list
        of them.

    Raises:
        ValueError: a negative, non-finite or huge coordinate of a token that is no padding. Not
            checked with ``traceable``, nor on a GPU where nothing is read back.

    Source: ``timm.models.naflexvit.NaFlexVit._generate_rope_naflex``.
    """
    fixed, tokens = rope.augmentation is None, patch_coord.shape[0] * patch_coord.shape[1]
    coord = patch_coord.detach().to(torch.int64) if traceable else whole_numbers(patch_coord)
    if traceable or tokens == 0 or (coord.is_cuda and fixed and not rope.mixed):
        embed = per_token(rope, coord, dtype)  # on a GPU sines are free and host reads are not
    else:
        heights, widths, *_ = read_grids(coord)
        sizes = list(zip(heights, widths))
        padded = any(h * w < coord.shape[1] for h, w in sizes)
        if rope.grid_independent:  # one grid holds all others
            sizes = [(max(heights), max(widths))] * len(sizes)
        cell_count = sum(h * w for h, w in set(sizes))
        # The formula also serves where saving sines does not pay: few tokens need few operations;
        # one huge coordinate would make a huge grid.
        by_formula = fixed and (tokens <= FEW_TOKENS or cell_count > 16 * tokens)
        embed = (
            per_token(rope, coord, dtype, padded)
            if by_formula
            else per_cell(rope, coord, dtype, sizes)
        )
    if not rope.mixed:
        return embed(None)
    embeddings = MixedEmbeddings(rope.frequencies.shape[1], embed)
    return (
        list(embeddings) if torch.compiler.is_dynamo_compiling() else embeddings
    )  # Dynamo reads no class's __iter__
