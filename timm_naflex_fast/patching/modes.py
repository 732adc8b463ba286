"""Strategy flags: their names, aliases, defaults, and the errors for names that do not exist."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

POS_EMBED = ("stock", "interpolate_cached", "grid_sample", "matmul")
PATCH_EMBED = ("stock", "matmul")
ROPE = ("stock", "batched")
MODES = POS_EMBED
ALIASES = {"matmul_resample": "matmul"}
MODE_VARIABLE = "TIMM_NAFLEX_FAST_MODE"


@dataclass(frozen=True)
class Flags:
    """Which strategy stands in for each of timm's resampling steps; ``"stock"`` is timm's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"

    @property
    def is_stock(self) -> bool:
        """Whether every step is timm's own."""
        return self == STOCK

    def as_dict(self) -> dict[str, str]:
        """The strategy of each step, by flag name."""
        return asdict(self)


STOCK = Flags()


def _name(flag: str, value: object, valid: tuple[str, ...]) -> str:
    if isinstance(value, str):
        name = value.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in valid:
            return name
    raise ValueError(f"{flag}={value!r} is not a strategy; valid: {', '.join(map(repr, valid))}")


def parse_flags(
    mode: str = "matmul", *, pos_embed: str | None = None, patch_embed: str | None = None, rope: str | None = None
) -> Flags:
    """Flags for ``mode``, each overridden by its own argument when given.

    ``mode`` names the position-embedding strategy and brings the exact fast form of everything else;
    ``mode="stock"`` is timm's own code throughout.

    Raises:
        ValueError: a name that is not a strategy, with the valid ones.
    """
    mode = _name("mode", mode, POS_EMBED)
    return Flags(
        pos_embed=mode if pos_embed is None else _name("pos_embed", pos_embed, POS_EMBED),
        patch_embed=("stock" if mode == "stock" else "matmul")
        if patch_embed is None
        else _name("patch_embed", patch_embed, PATCH_EMBED),
        rope=("stock" if mode == "stock" else "batched") if rope is None else _name("rope", rope, ROPE),
    )


def default_mode() -> str:
    """The mode where a command was given none: the environment's ``TIMM_NAFLEX_FAST_MODE``, else "matmul".

    Raises:
        ValueError: the variable names no strategy; with the valid ones.
    """
    return _name(MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "matmul", POS_EMBED)
