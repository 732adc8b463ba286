"""timm's rotary modules as numbers.

They say how a cell becomes two positions, and which frequencies turn these into angles. Every
type computes ``angle[c] = p_0 . f_0[c] + p_1 . f_1[c]`` from a token's two positions p. In axial,
DINOv3 and multimodal (mrope) modules at most one of f_0[c] and f_1[c] is not zero; mixed modules
learn both.

``tests/rope/test_batched.py`` reads every type.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
