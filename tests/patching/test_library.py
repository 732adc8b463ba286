"""``decide`` decides who computes a component, and says once why it is the library itself."""

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

    def run(device, said):
        x, key = torch.ones(2, device=device), (timm.EMBEDS, "_apply_learned_naflex_pos_embed")
        assert library.decide(timm.LIBRARY, key, model.embeds, x, reason=said).strategy == "stock"

    for reason, *case in (("a meta tensor", "meta", None), ("what the caller says", "cpu", "what the caller says")):
        with pytest.warns(UserWarning, match=f"{reason} stays with timm's own code"):
            run(*case)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(*case)
        assert status().fallbacks[reason] == 2
