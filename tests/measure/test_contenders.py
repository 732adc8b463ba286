"""Each contender computes its own formula inside a model, and is put back after it."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.measured import GRIDS, WITHOUT_HF, table_model
from tests.support.oracles import embed, small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import NAMES, missing, use
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.patching.settings import MODES


def formula(name, table, h, w, mode):
    """What a contender adds to one sample (h*w, C), from the issue's own formula or F.interpolate."""
    nchw = table.permute(0, 3, 1, 2)
    if name == "hf-siglip2":
        return F.interpolate(nchw, (h, w), mode="bilinear", antialias=True)[0].flatten(1).t()
    if name == "issue-2514-zeros":
        grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, h, w], align_corners=False)
        how = dict(mode=mode, padding_mode="zeros")
    else:
        y, x = ((torch.arange(n) * 2 + 1) / n - 1 for n in (h, w))
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None]
        how = dict(mode=name.removeprefix("timm-flag-"), padding_mode="border")
    return F.grid_sample(nchw, grid, align_corners=False, **how)[0].flatten(1).t()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in MODES])
def test_contender_inside_a_model_equals_its_formula(name, mode):
    model, batch = small_vit(pos_embed_interp_mode=mode).eval(), vit_batch(GRIDS)
    if why := missing(name, model.embeds):
        assert name == "hf-siglip2"
        pytest.skip(why)
    with torch.no_grad(), use(name, model):
        plain, got = model.embeds.norm(model.embeds.proj(batch["patches"])), embed(model, batch)
    for sample, (h, w) in enumerate(GRIDS):
        want = plain[sample, : h * w] + formula(name, model.embeds.pos_embed.detach(), h, w, mode)
        torch.testing.assert_close(got[sample, : h * w], want, atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name in WITHOUT_HF if missing(name, table_model().embeds) is None])
def test_everything_is_put_back_after_an_error(name):
    model = table_model()
    before, stock = dict(model.embeds.__dict__), embed(model)
    with ran(*{name} & {*STRATEGY_NAMES}), pytest.raises(RuntimeError, match="half way"), use(name, model):
        assert torch.allclose(embed(model), stock, atol=2e-6) == (name in ("stock", "interpolate_cached", "matmul"))
        raise RuntimeError("half way")
    assert model.embeds.__dict__ == before and torch.equal(embed(model), stock)
