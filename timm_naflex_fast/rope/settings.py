"""timm's rotary modules as numbers: how a cell becomes two positions, and which frequencies turn them into angles.

Every type computes ``angle[c] = p_0 . f_0[c] + p_1 . f_1[c]`` from a token's two positions p. In axial, DINOv3 and
multimodal (mrope) modules at most one of f_0[c] and f_1[c] is not zero; mixed modules learn both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """One of timm's rotary modules.

    Args:
        frequencies: f, (2, D/2), or learned (2, depth, heads, D/2), float32 at least; D is the head's width.
        split: ``frequencies`` are (D/4,): position 0 turns the first D/4 angles by them, position 1 the others.
        periods: with ``split``, the lengths of a full turn instead of frequencies.
        half: layout of the D sines (and cosines): each frequency at c and c + D/2; otherwise at 2c and 2c + 1.
        swap: position 0 is along x, not y.
        centered: positions are the cell's centre over the grid's size, mapped to [-1, 1]; otherwise the cell's index.
        offset: added to index or centre.
        normalize: the size that centres are divided by: "separate" axes, or the "min" or "max" of both.
        reference: (h, w) that every grid is stretched to.
        largest: ``reference`` stretches the batch's largest grid, and the others along with it, as older timm does.
        augment: (shift, jitter, rescale) to draw for each distinct grid, None where it is off.
        augment_device: where timm draws them.
    """

    frequencies: Tensor
    split: bool = False
    periods: bool = False
    half: bool = False
    swap: bool = False
    centered: bool = False
    offset: float = 0.0
    normalize: str = "separate"
    reference: tuple[int, int] | None = None
    largest: bool = False
    augment: tuple[float | None, float | None, float | None] | None = None
    augment_device: torch.device | None = None

    @property
    def mixed(self) -> bool:
        """Whether each block and head has its own frequencies."""
        return self.frequencies.ndim == 4

    @property
    def alike(self) -> bool:
        """Whether a cell has the same angles in every grid of a batch."""
        return not self.centered and self.augment is None and (self.reference is None or self.largest)

    def angles(self, positions: Tensor, block: int | None = None) -> Tensor:
        """Angles (..., D/2) for positions (..., 2); of a mixed ``block`` (..., heads, N, D/2) for (..., 1, N, 2)."""
        if self.split:
            pairs = positions.unsqueeze(-1)
            return (2 * math.pi * pairs / self.frequencies if self.periods else pairs * self.frequencies).flatten(-2)
        f = self.frequencies if block is None else self.frequencies[:, block].unsqueeze(2)
        first, second = positions.split(1, -1)
        return first * f[0] + second * f[1]

    def positions(self, places: Tensor, size: Tensor) -> Tensor:
        """Positions (..., 2), float32, of cells (y, x) in grids of ``size`` (h, w), which broadcast.

        Operations follow timm's order, so they round alike.
        """
        position = places.to(torch.float32)
        if self.centered:
            divisor = size
            if self.normalize != "separate":
                divisor = size.amin(-1, keepdim=True) if self.normalize == "min" else size.amax(-1, keepdim=True)
            position = (position + (0.5 + self.offset)) / divisor
        elif self.offset:
            position = position + self.offset
        if self.reference is not None:
            position = position / size * position.new_tensor(self.reference)
        if self.centered:
            position = 2.0 * position - 1.0
        return position.flip(-1) if self.swap else position


def read_rope(module: Any) -> Rope | str:
    """Read the settings of ``module``, the ``rope`` of a NaFlexVit; or return in words why timm's own code must run."""
    reader = _READERS.get(type(module).__name__)
    if reader is None or type(module).__module__ != "timm.layers.pos_embed_sincos":
        return f"rotary embeddings of the type {type(module).__name__}"
    return reader(module)


def _axial(module: Any) -> Rope | str:
    grid_type = getattr(module, "grid_type", "pixel" if module.in_pixels else "index")
    if module.bands is None or getattr(module, "_use_cached_embed", False):
        return "rotary embeddings kept for one grid alone"
    if grid_type not in ("index", "centered"):
        return f"rotary embeddings on a {grid_type!r} grid"
    bands = _at_least_float32(module.bands)
    reference = module.ref_feat_shape
    return Rope(
        bands,
        split=True,
        half=getattr(module, "rotate_half", False),
        swap=module.grid_indexing == "xy",
        centered=grid_type == "centered",
        offset=module.grid_offset,
        normalize=getattr(module, "normalize_coords", "separate"),
        reference=None if reference is None else (reference[0], reference[1]),
        largest=not hasattr(module, "grid_type"),
        augment=_augment(module),
        augment_device=bands.device,
    )


def _dinov3(module: Any) -> Rope | str:
    periods = module.periods
    if torch.finfo(periods.dtype).bits < 32:  # kept so by older timm, which then computes angles in it
        return f"DINOv3 rotary embeddings with {periods.dtype} periods"
    return Rope(
        periods,
        split=True,
        periods=True,
        half=module.rotate_half,
        # Older timm returns (y, x) with either indexing.
        swap=module.grid_indexing == "xy" and hasattr(module, "get_batch_embeds"),
        centered=True,
        offset=module.grid_offset,
        normalize=module.normalize_coords,
        augment=_augment(module),
    )


def _mrope(module: Any) -> Rope | str:
    bands = _at_least_float32(module.inv_freq)
    frequencies = torch.stack([bands * (module.axis == 1), bands * (module.axis == 2)])
    return Rope(frequencies, half=True, augment=_augment(module), augment_device=bands.device)


def _mixed(module: Any) -> Rope | str:
    return Rope(
        module.freqs.float(),
        swap=module.grid_indexing == "xy",
        augment=_augment(module),
        augment_device=module.freqs.device,
    )


_READERS: dict[str, Callable[[Any], Rope | str]] = {
    "RotaryEmbeddingCat": _axial,
    "RotaryEmbeddingDinoV3": _dinov3,
    "RotaryEmbeddingMRope": _mrope,
    "RotaryEmbeddingMixed": _mixed,
}


def _at_least_float32(bands: Tensor) -> Tensor:
    return bands.to(torch.promote_types(bands.dtype, torch.float32))


def _augment(module: Any) -> tuple[float | None, float | None, float | None] | None:
    if not (module.training and getattr(module, "aug_active", False)):
        return None
    return module.shift_coords, module.jitter_coords, module.rescale_coords
