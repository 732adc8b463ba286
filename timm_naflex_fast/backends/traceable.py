"""The backend of plain tensor operations, which reads nothing back: one graph for every grid.

``torch.export`` and ``torch.jit.trace`` record these operations, so that a program runs without
this package; and ``torch.func`` transforms them.

Each token has a row of H0*W0 weights, computed from its coordinate in closed form, and one product
takes all tokens to their embeddings: (B, N, H0*W0) @ (H0*W0, C). Where a token reads few cells of a
large table, no product runs: these cells are gathered and added in float32, which no flag rounds
either. ``resampling/by_position.py`` computes all this.
"""

import torch
from torch import Tensor

from ..batch.checks import MAX_COORDINATE, most_cells
from ..batch.tokens import grid_sizes_from_coord, tokens_of_images, whole_numbers
from ..resampling.by_position import TokenPositions, embeddings_at
from ..resampling.spec import ResizeSpec


def add(x: Tensor, table: Tensor, patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the table (H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    See ``eager.add``. The coordinates are (B, N, 2), or (1, N, 2) for all samples. Tokens may
    come in any order, and any may be missing. Those with a negative or non-finite coordinate get
    NaN, and those of a grid with far more cells than there are tokens. Where the reference samples,
    every token is sampled at its coordinate, also at a negative one and between cells; only
    non-finite ones get NaN.
    """
    positions, embedded = token_positions(patch_coord.to(x.device), spec)
    embeddings = embeddings_at(table, positions, spec).to(x.dtype)
    # -0.0, which added changes no token.
    x.add_(embeddings.masked_fill(~embedded[..., None], -0.0))


def token_positions(patch_coord: Tensor, spec: ResizeSpec) -> tuple[TokenPositions, Tensor]:
    """The positions, and which tokens (B, N) get an embedding, or NaN.

    Grids as timm reads them: the largest coordinate + 1. A sample's first h*w tokens belong to it.
    """
    if spec.samples():
        coord = patch_coord.detach().to(torch.float32)  # (B, N, 2)
    else:
        coord = whole_numbers(patch_coord).clamp(-1, MAX_COORDINATE)
    size = grid_sizes_from_coord(coord)  # (B, 2)
    if spec.samples():  # at any coordinate, of padding too
        h, w = size[..., None].unbind(1)  # (B, 1)
        y, x = coord.unbind(-1)  # (B, N)
        return TokenPositions(h, w, y, x), torch.ones_like(y, dtype=torch.bool)

    length = coord.shape[1]
    embedded = tokens_of_images(size, length)  # (B, N)
    if spec.embeds_padding:
        embedded = torch.ones_like(embedded)
    cells = size.prod(1, keepdim=True)
    no_grid = (cells < 1) | (cells > most_cells(length))  # (B, 1)
    wrong = (embedded & (coord < 0).any(-1)) | no_grid  # (B, N)

    # Padding takes the place (0, 0): its own coordinate may be anything.
    coord = coord.masked_fill(~embedded[..., None], 0).to(torch.float32)
    coord = coord.masked_fill(wrong[..., None], torch.nan)
    h, w = size.clamp(min=1).to(torch.float32)[..., None].unbind(1)
    return TokenPositions(h, w, *coord.unbind(-1)), embedded | wrong
