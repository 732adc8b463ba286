"""The rotary embeddings of a batch: one formula, for every token or for every cell.

The formula for every token needs no host read, so compilers capture it, and GPUs run it. But on a
CPU B*N*D sines cost more than writing them. There, outside graphs, where many tokens share a cell,
the formula serves each cell once, and a token takes the line of its cell. The backward to the
learned frequencies of mixed types then first adds up the gradients of a cell's tokens.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.tokens import grid_sizes_from_coord, runs_of, tokens_of_images, whole_numbers
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
        embeddings (B, heads, N, 2D), one per block, each made when it is asked for.

    Raises:
        InvalidCoordinateError: see ``runs_of``. Not checked with ``traceable``, nor on a GPU:
            nothing is read back.

    Source: ``timm.models.naflexvit.NaFlexVit._generate_rope_naflex``.
    """
    coord = whole_numbers(patch_coord)
    sizes = grid_sizes_from_coord(coord)  # (B, 2)
    is_padding = ~tokens_of_images(sizes, coord.shape[1])  # (B, N)
    size = sizes[:, None]  # (B, 1, 2)
    positions = rope.positions(coord, size)  # (B, N, 2)

    line = None
    has_padding = True
    # On a GPU sines are free, and host reads are not.
    if not traceable and coord.is_cpu and coord.numel() > 0:
        runs_of(coord, coord, embeds_padding=False)  # it refuses coordinates that are no cells
        line = line_of_token(rope, coord, size, is_padding)
        has_padding = bool(is_padding.any())
    if line is not None:
        # One of the tokens on each line tells its position.
        of_lines = positions.new_zeros(int(line.max()) + 1, 2)  # (R, 2)
        of_lines[line] = positions
        positions = of_lines

    def embeddings(block: int) -> Tensor:
        values = sin_cos(rope.angles(positions, block), rope.rotate_half)  # (..., heads, 2D)
        if line is not None:
            values[0] = 0  # padding's line
            # With a gradient the cast comes last: so a cell's gradients are added in float32.
            lines = values if values.requires_grad else values.to(dtype)
            values = F.embedding(line, lines.flatten(1)).unflatten(2, lines.shape[1:])
        elif has_padding:
            values = values.masked_fill(is_padding[..., None, None], 0.0)
        return values.to(dtype).transpose(1, 2)  # (B, heads, N, 2D)

    if not rope.mixed:
        return embeddings(0)
    return map(embeddings, range(rope.frequencies.shape[1]))


def sin_cos(angles: Tensor, rotate_half: bool) -> Tensor:
    """Angles (..., D/2) to D sines and D cosines (..., 2D).

    Each stands there twice: D/2 apart (``rotate_half``), or side by side.
    """
    values = torch.stack([angles.sin(), angles.cos()], -2)  # (..., 2, D/2)
    beside = -2 if rotate_half else -1
    return torch.stack([values, values], beside).flatten(-3)


def line_of_token(rope: Rope, coord: Tensor, size: Tensor, is_padding: Tensor) -> Tensor | None:
    """The line that each token (B, N, 2) takes, (B, N), all on a CPU.

    Line 0 is padding's. After it come the distinct grids one after the other, each cell on a line
    of its own. None where the formula for every token costs less.

    ``size``: (B, 1, 2), the samples' grids. ``is_padding``: (B, N).
    """
    if len(coord) == 1:
        return None
    if not rope.centered and rope.ref_feat_shape is None:
        # A cell has the same angles in every grid: one grid that holds all others will do.
        size = size.amax(0, keepdim=True)
    distinct, grid = size.unique(dim=0, return_inverse=True)  # (G, 1, 2), (B,)

    # To save sines pays if many tokens share a cell: a lookup costs half of what the formula does.
    lengths = distinct.prod(2)  # (G, 1)
    if 4 * lengths.sum() > coord.numel():
        return None
    first = 1 + lengths.cumsum(0) - lengths  # (G, 1)
    y, x = coord.unbind(-1)  # (B, N) each
    return (first[grid] + y * size[..., 1] + x).masked_fill(is_padding, 0)
