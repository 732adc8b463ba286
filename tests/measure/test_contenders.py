"""Each contender computes what it is named after inside a model, and is put back after it."""

import pytest
import torch

from tests.support.measured import GRIDS, table_model
from tests.support.oracles import embed, small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import CONTENDERS, use
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.patching.settings import MODES


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in MODES])
def test_a_contender_inside_a_model_is_what_timm_makes_with_this_setting(name, mode):
    model, batch = small_vit(pos_embed_interp_mode=mode).eval(), vit_batch(GRIDS)
    timms = small_vit(pos_embed_use_grid_sample=True, pos_embed_interp_mode=name.removeprefix("timm-flag-")).eval()
    timms.load_state_dict(model.state_dict())
    with use(name, model):
        assert torch.equal(embed(model, batch), embed(timms, batch))


@pytest.mark.parametrize("name", CONTENDERS)
def test_everything_is_put_back_after_an_error(name):
    model = table_model()
    before, stock = dict(model.embeds.__dict__), embed(model)
    with ran(*{name} & {*STRATEGY_NAMES}), pytest.raises(RuntimeError, match="half way"), use(name, model):
        assert torch.allclose(embed(model), stock, atol=2e-6) == (name in ("stock", "interpolate_cached", "matmul"))
        raise RuntimeError("half way")
    assert model.embeds.__dict__ == before and torch.equal(embed(model), stock)
