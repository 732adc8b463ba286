"""timm's rotary modules as numbers: how a cell becomes two positions, and which frequencies turn
them into angles.

Every type computes ``angle[c] = p_0 . f_0[c] + p_1 . f_1[c]`` from a token's two positions p. In
axial, DINOv3 and multimodal (mrope) modules at most one of f_0[c] and f_1[c] is not zero; mixed
modules learn both.
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
        scales_to_batch_max: ``ref_feat_shape`` stretches the batch's largest grid, and the others
            along with it, as older timm does.
        augmentation: (shift, jitter, rescale) to draw for each distinct grid, None where it is off.
    """

    frequencies: Tensor
    periods: bool
    rotate_half: bool
    xy_order: bool
    centered: bool
    offset: float
    normalize: str
    ref_feat_shape: tuple[int, int] | None
    scales_to_batch_max: bool
    augmentation: tuple[float | None, float | None, float | None] | None

    @property
    def mixed(self) -> bool:
        """Whether each block and head has its own frequencies."""
        return self.frequencies.ndim == 4

    @property
    def grid_independent(self) -> bool:
        """Whether a cell has the same angles in every grid of a batch."""
        same_stretch = self.ref_feat_shape is None or self.scales_to_batch_max
        return not self.centered and self.augmentation is None and same_stretch

    def angles(self, positions: Tensor, block: int | None = None) -> Tensor:
        """Angles (..., D/2) for positions (..., 2); of a mixed ``block`` (..., heads, N, D/2) for
        (..., 1, N, 2)."""
        if (
            self.frequencies.ndim == 1
        ):  # (D/4,): position 0 turns the first half of the angles; rounded as timm does
            pairs = positions.unsqueeze(-1)
            return (
                2 * math.pi * pairs / self.frequencies if self.periods else pairs * self.frequencies
            ).flatten(-2)
        f = self.frequencies if block is None else self.frequencies[:, block].unsqueeze(2)
        first, second = positions.split(1, -1)
        return first * f[0] + second * f[1]

    def positions(self, cells: Tensor, size: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Positions (..., 2), float32, of cells (y, x) in grids of ``size`` (h, w), which
        broadcast.

        ``drawn`` (..., 3, 2) is the augmentation of each one's grid: a shift, then two factors.
        Operations follow timm's order, so they round alike.
        """
        position = cells.to(torch.float32) + (0.5 + self.offset if self.centered else self.offset)
        if self.centered:
            side = {"min": torch.amin, "max": torch.amax}.get(self.normalize)
            position = position / (size if side is None else side(size, -1, keepdim=True))
        if self.ref_feat_shape is not None:
            position = position / size
            # Numbers of the host one by one: to copy a tensor of them to a GPU would wait.
            position = torch.stack(
                [p * n for p, n in zip(position.unbind(-1), self.ref_feat_shape)], -1
            )
        if self.centered:
            position = 2.0 * position - 1.0
        if self.xy_order:
            position = position.flip(-1)
        if drawn is not None:
            shift, jitter, rescale = drawn.unbind(-2)
            position = (position + shift) * jitter * rescale
        return position


def read_rope(module: Any) -> Rope | str:
    """Read the settings of ``module``, the ``rope`` of a NaFlexVit; or return in words why timm's
    own code must run.

    A type that lacks a setting, as all do in some release, has what is the default here.
    """
    kind = type(module).__name__
    if kind not in FREQUENCIES or type(module).__module__ != "timm.layers.pos_embed_sincos":
        return f"rotary embeddings of the type {kind}"
    frequencies, dinov3 = getattr(module, FREQUENCIES[kind]), kind == "RotaryEmbeddingDinoV3"
    settings = vars(module)
    if frequencies is None or settings.get("_use_cached_embed", False):
        return "rotary embeddings kept for one grid alone"
    grid_type = "pixel" if settings.get("in_pixels", False) else "centered" if dinov3 else "index"
    grid_type = settings.get("grid_type", grid_type)
    if grid_type not in ("index", "centered"):
        return f"rotary embeddings on a {grid_type!r} grid"
    if (
        dinov3 and torch.finfo(frequencies.dtype).bits < 32
    ):  # kept so by older timm, which then computes angles in it
        return f"DINOv3 rotary embeddings with {frequencies.dtype} periods"
    draws = module.training and settings.get("aug_active", False)
    dtype = (
        torch.promote_types(frequencies.dtype, torch.float32)
        if kind != "RotaryEmbeddingMixed"
        else torch.float32
    )
    frequencies = frequencies.to(dtype)
    if kind == "RotaryEmbeddingMRope":  # axis 0 is time, which does not pass in an image
        frequencies = torch.stack([frequencies * (module.axis == axis) for axis in (1, 2)])
    return Rope(
        frequencies,
        periods=dinov3,
        rotate_half=settings.get("rotate_half", kind == "RotaryEmbeddingMRope"),
        # Older timm's DINOv3 returns (y, x) with either indexing.
        xy_order=module.grid_indexing == "xy"
        and (not dinov3 or hasattr(module, "get_batch_embeds")),
        centered=grid_type == "centered",
        offset=settings.get("grid_offset", 0.0),
        normalize=settings.get("normalize_coords", "separate"),
        ref_feat_shape=settings.get("ref_feat_shape", None),
        scales_to_batch_max="grid_type" not in settings,
        augmentation=(module.shift_coords, module.jitter_coords, module.rescale_coords)
        if draws
        else None,
    )
