"""timm's rotary modules as numbers.

They say how a cell becomes two positions, and which frequencies turn these into angles. Every
type computes ``angle[c] = p_0 . f_0[c] + p_1 . f_1[c]`` from a token's two positions p. In axial,
DINOv3 and multimodal (mrope) modules at most one of f_0[c] and f_1[c] is not zero; mixed modules
learn both.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FREQUENCIES = {  # where each type keeps them
    "RotaryEmbeddingCat": "bands",
    "RotaryEmbeddingDinoV3": "periods",
    "RotaryEmbeddingMRope": "inv_freq",
    "RotaryEmbeddingMixed": "freqs",
}


@dataclass(frozen=True)
class Rope:
    """One of timm's rotary modules.

    Args:
        frequencies: f, (2, D/2), float32 at least, D is the head's width; or learned ones, (2,
            depth, heads, D/2). Or (D/4,), of which ``periods`` are the lengths of a full turn.
        rotate_half: layout of the D sines (and cosines): each frequency at c and c + D/2; otherwise
            at 2c and 2c + 1.
        xy_order: position 0 is along x, not y.
        centered: positions are the cell's centre over the grid's size, mapped to [-1, 1]; otherwise
            the cell's index.
        offset: added to index or centre.
        normalize: the size that centres are divided by: "separate" axes, or the "min" or "max" of
            both.
        ref_feat_shape: (h, w) that every grid is stretched to.
    """

    frequencies: Tensor
    periods: bool
    rotate_half: bool
    xy_order: bool
    centered: bool
    offset: float
    normalize: str
    ref_feat_shape: tuple[int, int] | None

    @property
    def mixed(self) -> bool:
        """Whether each block and head has its own frequencies."""
        return self.frequencies.ndim == 4

    @property
    def grid_independent(self) -> bool:
        """Whether a cell has the same angles in every grid of a batch."""
        return not self.centered and self.ref_feat_shape is None

    def angles(self, positions: Tensor, block: int | None = None) -> Tensor:
        """Angles (..., D/2) for positions (..., 2).

        Of a mixed ``block`` (..., heads, N, D/2) for (..., 1, N, 2).
        """
        f = self.frequencies
        if f.ndim == 1:  # (D/4,): position 0 turns the first half of the angles
            pairs = positions.unsqueeze(-1)  # (..., 2, 1)
            # Multiplied or divided as timm does, so that it rounds alike.
            turned = 2 * math.pi * pairs / f if self.periods else pairs * f
            return turned.flatten(-2)
        if block is not None:
            f = f[:, block].unsqueeze(2)  # (2, heads, 1, D/2)
        first, second = positions.split(1, -1)
        return first * f[0] + second * f[1]

    def positions(self, cells: Tensor, size: Tensor) -> Tensor:
        """Positions (..., 2), float32, of cells (y, x) in grids of ``size`` (h, w).

        The two broadcast. Operations follow timm's order, so they round alike.
        """
        position = cells.to(torch.float32)
        if self.centered:
            position = (position + (0.5 + self.offset)) / self._divisor(size)
        else:
            position = position + self.offset
        if self.ref_feat_shape is not None:
            # Numbers of the host one by one: to copy a tensor of them to a GPU would wait.
            y, x = (position / size).unbind(-1)
            ref_h, ref_w = self.ref_feat_shape
            position = torch.stack([y * ref_h, x * ref_w], -1)
        if self.centered:
            position = 2.0 * position - 1.0
        if self.xy_order:
            position = position.flip(-1)
        return position

    def _divisor(self, size: Tensor) -> Tensor:
        """What the centres of cells are divided by, for grids of ``size`` (..., 2)."""
        if self.normalize == "min":
            return size.amin(-1, keepdim=True)
        if self.normalize == "max":
            return size.amax(-1, keepdim=True)
        return size


def read_rope(module: Any) -> Rope | str:
    """The settings of ``module``, the ``rope`` of a NaFlexVit.

    Or in words why timm's own code must run. A type that lacks a setting, as all do in some
    release, has what is the default here.
    """
    kind = type(module).__name__
    if kind not in FREQUENCIES or type(module).__module__ != "timm.layers.pos_embed_sincos":
        return f"rotary embeddings of the type {kind}"
    is_dinov3 = kind == "RotaryEmbeddingDinoV3"
    settings = vars(module)
    frequencies = getattr(module, FREQUENCIES[kind])
    grid_type = _grid_type(settings, "centered" if is_dinov3 else "index")
    if frequencies is None or settings.get("_use_cached_embed", False):
        return "rotary embeddings kept for one grid alone"
    if grid_type not in ("index", "centered"):
        return f"rotary embeddings on a {grid_type!r} grid"
    if module.training and settings.get("aug_active", False):
        return "rotary embeddings at random coordinates"
    # Older timm stretches the largest grid of a batch to it, and the others along with that one.
    if settings.get("ref_feat_shape") is not None and "grid_type" not in settings:
        return "rotary embeddings with a ref_feat_shape"
    # Older timm keeps the periods in the model's dtype, and computes angles in it.
    if is_dinov3 and torch.finfo(frequencies.dtype).bits < 32:
        return f"DINOv3 rotary embeddings with {frequencies.dtype} periods"
    # Older timm's DINOv3 returns (y, x) with either indexing.
    knows_indexing = not is_dinov3 or hasattr(module, "get_batch_embeds")
    return Rope(
        _widened(frequencies, module),
        periods=is_dinov3,
        rotate_half=settings.get("rotate_half", kind == "RotaryEmbeddingMRope"),
        xy_order=module.grid_indexing == "xy" and knows_indexing,
        centered=grid_type == "centered",
        offset=settings.get("grid_offset", 0.0),
        normalize=settings.get("normalize_coords", "separate"),
        ref_feat_shape=settings.get("ref_feat_shape", None),
    )


def _grid_type(settings: dict[str, Any], default: str) -> str:
    """Where the positions come from: "index", "centered", or another word that timm knows."""
    if settings.get("in_pixels", False):  # older timm's word
        default = "pixel"
    return settings.get("grid_type", default)


def _widened(frequencies: Tensor, module: Any) -> Tensor:
    """The frequencies as :class:`Rope` takes them, in float32 at least; mixed ones in float32."""
    kind = type(module).__name__
    if kind == "RotaryEmbeddingMixed":
        return frequencies.to(torch.float32)
    frequencies = frequencies.to(torch.promote_types(frequencies.dtype, torch.float32))
    if kind == "RotaryEmbeddingMRope":  # axis 0 is time, which does not pass in an image
        by_axis = [frequencies * (module.axis == axis) for axis in (1, 2)]
        return torch.stack(by_axis)
    return frequencies
