"""``resolve_impl`` decides who computes a component, and says once why it is the library itself."""

import warnings

import pytest
import torch

from tests.support.oracles import small_vit
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching import library, timm


@pytest.mark.usefixtures("clean")
def test_each_reason_is_warned_of_once():
    model = small_vit()
    library.warned.clear()
    enable()

    def who(x, reason=()):
        key = timm.EMBEDS, "_apply_learned_naflex_pos_embed"
        assert library.resolve_impl(timm.LIBRARY, model.embeds, key, x, inputs=lambda _: reason)[0] == "stock"
        return x

    for reason, run in {
        "a torch.func transform": lambda: torch.func.vmap(who)(torch.ones(2)),
        "a meta tensor": lambda: who(torch.ones(2, device="meta")),
        "what the inputs say": lambda: who(torch.ones(2), "what the inputs say"),
    }.items():
        with pytest.warns(UserWarning, match=f"{reason} stays with timm's own code"):
            run()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
        assert status().fallbacks[reason] == 2
