"""The contenders that ``drift`` and ``bench`` compare: every code that resamples a position table,
each named once.

The names need neither torch nor timm, so a command can define its options from
them.

Tests: tests/commands/measure/drift/test_survey.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...names import STRATEGY_NAMES

BASELINE = "stock"  # timm's own loop
FLAGS = ("timm-flag-bilinear", "timm-flag-bicubic")  # timm's own, with either filter
CONTENDERS = (BASELINE, *STRATEGY_NAMES, *FLAGS)


@contextmanager
def use(name: str, model: Any) -> Iterator[None]:
    """Inside, ``model`` resamples its position table as the contender does; afterwards as before.

    Patch kernels and rotary tables stay timm's own, so that only the position embedding differs.

    Args:
        name: one of ``CONTENDERS``. Both with timm's own setting give the same for a factorized
            table, which timm resizes linearly under either.
        model: a NaFlexVit, or a NaFlexEmbeds alone.
    """
    from ...patching.install import enable

    embeds = getattr(model, "embeds", model)
    before = (embeds.pos_embed_use_grid_sample, embeds.pos_embed_interp_mode)
    choice: Any = name
    # timm's own flag is an attribute of the embeddings: the model's code stays timm's.
    if name in FLAGS:
        choice = BASELINE
        embeds.pos_embed_use_grid_sample = True
        embeds.pos_embed_interp_mode = name.removeprefix("timm-flag-")
    try:
        with enable("stock", pos_embed=choice, model=model):
            yield
    finally:
        embeds.pos_embed_use_grid_sample, embeds.pos_embed_interp_mode = before
