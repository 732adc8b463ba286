"""What counts as rounding: element by element, with outliers, infinity and NaN."""

import pytest
import torch

from tests.support.measured import batches, table_model
from tests.support.oracles import small_vit
from tests.support.running import ran
from timm_naflex_fast.commands.measure.drift.survey import is_exact, survey
from timm_naflex_fast.patching.timm_methods import read_embeds

EXACT = ["interpolate_cached", "matmul"]
SETTINGS = [
    (dict(pos_embed_interp_mode="bicubic", pos_embed_grid_size=(12, 8)), EXACT),
    (dict(pos_embed_interp_mode="bilinear", pos_embed_ar_preserving=True), EXACT),
    (dict(pos_embed="factorized"), EXACT),
    (dict(pos_embed_interp_mode="bicubic", pos_embed_use_grid_sample=True), ["grid_sample"]),
    # Of these, every timm rounds positions by the longest grid of the batch.
    (dict(pos_embed="factorized", pos_embed_use_grid_sample=True), ["grid_sample"]),
]


@pytest.mark.parametrize(("setting", "exact"), SETTINGS)
def test_exact_strategies_stay_exact(setting, exact):
    for scale in (1e-3, 1.0, 100.0):
        model = small_vit(**setting).eval()
        for table in read_embeds(model.embeds)[0]:
            torch.nn.init.normal_(table, std=scale)
        with ran(*exact):
            found = survey(model, batches(), exact)
        for name in exact:
            assert is_exact(found, name), (name, scale)


@ran("grid_sample")
@pytest.mark.parametrize("where", ["channel", "cell", "weight"])
def test_an_outlier_excuses_nothing_elsewhere(where):
    model = table_model(pos_embed_grid_size=(16, 16))
    table = model.embeds.pos_embed.data[0]
    parts = {"channel": table[:, :, 3], "cell": table[0, 0], "weight": table[:1, :1, 3]}
    parts[where].fill_(500)
    found = survey(model, batches(), ["grid_sample", "matmul"])
    assert is_exact(found, "matmul") and not is_exact(found, "grid_sample")


TOKENS = "with stock, the model's tokens hold infinity or NaN"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("embeds.pos_embed", TOKENS),
        ("embeds.proj.weight", TOKENS),
        ("blocks.0.norm1.weight", "output hold"),
        ("head.weight", "logits hold infinity or NaN"),
    ],
)
def test_what_is_not_finite_is_named(value, part, named):
    model = table_model()
    model.get_parameter(part).data[0] = value
    with pytest.raises(ValueError, match=named):
        survey(model, batches())


def test_a_model_without_a_table_is_named():
    with pytest.raises(ValueError, match="no position table, learned or factorized"):
        survey(small_vit(pos_embed="none"), batches())
