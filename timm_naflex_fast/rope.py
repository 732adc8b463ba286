"""The rotary embeddings of a NaFlex batch: one formula for timm's four types, without a loop.

A module of timm's is read as numbers (:class:`Rope`): how a cell becomes two positions, and which
frequencies turn these into angles. Every type computes ``angle[c] = p_0 . f_0[c] + p_1 . f_1[c]``
from a token's two positions p. In axial, DINOv3 and multimodal (mrope) modules at most one of f_0[c]
and f_1[c] is not zero; mixed modules learn both.

The formula for every token needs no host read, so compilers capture it, and GPUs run it. But on a
CPU B*N*D sines cost more than writing them. There, outside graphs, where many tokens share a cell,
the formula serves each cell once, and a token takes the line of its cell. The backward to the
learned frequencies of mixed types then first adds up the gradients of a cell's tokens.

Tests: tests/rope/test_batched.py.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pos_embed.table import ResizeSpec
from .pos_embed.tokens import grid_sizes_from_coord, runs_of, tokens_of_images, whole_numbers

FREQUENCIES = {  # where each type keeps them
    "RotaryEmbeddingCat": "bands",
    "RotaryEmbeddingDinoV3": "periods",
    "RotaryEmbeddingMRope": "inv_freq",
    "RotaryEmbeddingMixed": "freqs",
}
# The settings with which NaFlexVit makes them, of those that change what is computed here. A type
# that lacks one, as all do in some release, computes as with this value.
MADE_WITH = {
    "in_pixels": False,
    "grid_type": "index",
    "normalize_coords": "separate",
    "feat_shape": None,
}


class Rope(NamedTuple):
    """One of timm's rotary modules.

    Args:
        frequencies: f of y, then of x, (2, depth, heads, D/2), float32 at least, D is the head's width. Only mixed
            types have a depth and heads other than 1.
        mixed: whether each block and head has its own, learned frequencies.
        rotate_half: layout of the D sines (and cosines): each frequency at c and c + D/2; otherwise
            at 2c and 2c + 1.
        centered: positions are the cell's centre over the grid's size, mapped to [-1, 1]; otherwise
            the cell's index.
        offset: added to the index; half a cell, and what the module adds to it, where ``centered``.
        ref_feat_shape: (h, w) that every grid is stretched to; of index positions alone.
    """

    frequencies: Tensor
    mixed: bool
    rotate_half: bool
    centered: bool
    offset: float
    ref_feat_shape: tuple[int, int] | None

    def angles(self, positions: Tensor, block: int) -> Tensor:
        """Angles (..., heads, D/2) of a block for positions (..., 2)."""
        first, second = positions.unsqueeze(-2).split(1, -1)  # (..., 1, 1) each
        f = self.frequencies[:, block]  # (2, heads, D/2)
        return first * f[0] + second * f[1]

    def positions(self, cells: Tensor, size: Tensor) -> Tensor:
        """Positions (..., 2), float32, of cells (y, x) in grids of ``size`` (h, w).

        The two broadcast. Operations follow timm's order, so they round alike.
        """
        position = cells.to(torch.float32) + self.offset
        if self.centered:
            return 2.0 * (position / size) - 1.0
        if self.ref_feat_shape is None:
            return position
        # Numbers of the host one by one: to copy a tensor of them to a GPU would wait.
        y, x = (position / size).unbind(-1)
        ref_h, ref_w = self.ref_feat_shape
        return torch.stack([y * ref_h, x * ref_w], -1)


def read_rope(module: Any) -> Rope | str:
    """The settings of ``module``, the ``rope`` of a NaFlexVit.

    Or in words why timm's own code must run.
    """
    kind = type(module).__name__
    if kind not in FREQUENCIES or type(module).__module__ != "timm.layers.pos_embed_sincos":
        return f"rotary embeddings of the type {kind}"
    settings = vars(module)
    for name, value in MADE_WITH.items():
        found = settings.get(name, value)
        if found != value:
            return f"rotary embeddings with {name}={found!r}"
    if module.training and settings.get("aug_active"):
        return "rotary embeddings at random coordinates"
    # Older timm stretches the largest grid of a batch to it, and the others along with that one.
    if settings.get("ref_feat_shape") is not None and "grid_type" not in settings:
        return "rotary embeddings with a ref_feat_shape"
    # Older timm computes DINOv3's angles in the model's dtype, and in one order of the axes.
    is_dinov3 = kind == "RotaryEmbeddingDinoV3"
    if is_dinov3 and not hasattr(module, "get_batch_embeds"):
        return "DINOv3's rotary embeddings"
    return Rope(
        _by_position(module),
        mixed=kind == "RotaryEmbeddingMixed",
        rotate_half=settings.get("rotate_half", kind == "RotaryEmbeddingMRope"),
        centered=is_dinov3,
        offset=settings.get("grid_offset", 0.0) + 0.5 * is_dinov3,
        ref_feat_shape=settings.get("ref_feat_shape"),
    )


def _by_position(module: Any) -> Tensor:
    """The frequencies as :class:`Rope` takes them, in float32 at least."""
    kind = type(module).__name__
    frequencies = getattr(module, FREQUENCIES[kind])
    f = frequencies.to(torch.promote_types(frequencies.dtype, torch.float32))
    if kind == "RotaryEmbeddingDinoV3":  # periods are the lengths of a full turn
        f = 2 * math.pi / f
    if kind == "RotaryEmbeddingMRope":  # axis 0 is time, which does not pass in an image
        f = torch.stack([f * (module.axis == axis) for axis in (1, 2)])  # (2, D/2)
    elif kind != "RotaryEmbeddingMixed":
        # The first axis turns the first half of the angles, the second axis the second.
        f = torch.block_diag(f, f)  # (2, D/2)
    if f.ndim == 2:
        f = f[:, None, None]
    if module.grid_indexing == "xy":  # position 0 is x
        f = f.flip(0)
    return f


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
        ValueError: see ``runs_of``. Not checked with ``traceable``, nor on a GPU:
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
        runs_of(coord, coord, ResizeSpec())  # it refuses coordinates that are no cells
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
    sines = angles.sin()
    cosines = angles.cos()
    if rotate_half:
        return torch.stack([sines, sines, cosines, cosines], -2).flatten(-2)
    values = torch.stack([sines, cosines], -2)  # (..., 2, D/2)
    return values.unsqueeze(-1).expand(*values.shape, 2).flatten(-3)


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
