"""``resolve_impl`` decides who computes a component, and says once why it is the library itself."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from timm.layers import patch_embed
from timm.models.naflexvit import NaFlexEmbeds

from tests.support.oracles import STOCK, small_vit
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


def test_the_librarys_own_functions_are_found_patched_or_not():
    class Derived(NaFlexEmbeds):
        pass

    name, function = "_apply_learned_naflex_pos_embed", patch_embed.resample_patch_embed
    for context in (enable(), nullcontext()):
        with context:
            assert library.original(NaFlexEmbeds, name) is library.original(Derived, name) is STOCK[name]
            assert library.original(patch_embed, "resample_patch_embed") is function
