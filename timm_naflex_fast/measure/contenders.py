"""The contenders that ``drift`` and ``bench`` compare: every code that resamples a position table,
each named once.

The names and their words need neither torch nor timm, so a command can define its options from
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ..names import STRATEGY_NAMES

LEARNED, SAMPLED = "_apply_learned_naflex_pos_embed", "_apply_learned_naflex_pos_embed_grid_sample"
BASELINE = "stock"
CONTENDERS = {
    BASELINE: "timm's own loop",
    **dict.fromkeys(STRATEGY_NAMES, "this package"),
    "timm-flag-bilinear": "timm's own grid_sample setting, bilinear",
    "timm-flag-bicubic": "timm's own grid_sample setting, bicubic",
}


@contextmanager
def use(name: str, model: Any) -> Iterator[None]:
    """Inside, ``model`` resamples its position table as the contender does; afterwards as before.

    Patch kernels and rotary tables stay timm's own, so that only the position embedding differs.
    The contender is then the NaFlexEmbeds' ``_apply_learned_naflex_pos_embed(x, patch_coord)``,
    which adds in place.

    Args:
        name: one of ``CONTENDERS``; those with timm's own setting need a learned 2-D table.
        model: a NaFlexVit, or a NaFlexEmbeds alone.
    """
    from ..patching.install import enable, original
    from ..patching.timm import EMBEDS

    embeds: Any = getattr(model, "embeds", model)
    changed: dict[str, Any] = {}  # attributes of the one instance hide those of timm's class
    if name not in STRATEGY_NAMES:
        changed = {
            method: original((EMBEDS, method)).__get__(embeds) for method in (LEARNED, SAMPLED)
        }
        if name != BASELINE:
            changed = dict.fromkeys(changed, changed[SAMPLED]) | {
                "pos_embed_interp_mode": name.split("-")[2]
            }
    with (
        enable("stock", pos_embed="stock" if changed else name, model=model),
        patch.dict(embeds.__dict__, changed),
    ):
        yield
