"""transformers' towers: enabled by name or found in a model, the same result, and their own code
again afterwards."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.torch_version import TorchVersion

from tests.support.checks import one_by_one
from tests.support.oracles import relative, seeded, small_vit
from tests.support.running import running
from timm_naflex_fast import enable, status

transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
cosmos3 = pytest.importorskip("transformers.models.cosmos3_edge.modeling_cosmos3_edge")
radio = pytest.importorskip("transformers.models.radio.modeling_radio")
hunyuan = pytest.importorskip("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
MODES = ["matmul", "interpolate_cached"]
TOWERS = {
    "siglip2": (siglip2.Siglip2VisionEmbeddings, "resize_positional_embeddings"),
    "cosmos3": (cosmos3.Cosmos3EdgeVisionEmbeddings, "resize_positional_embeddings"),
    "radio": (radio.RadioPatchEmbeddings, "_interpolate_position_embedding"),
    "hunyuan": (hunyuan.HunYuanVLVisionPatchEmbed, "interpolate_pos_encoding"),
}
BY_IMAGE = ("radio", "hunyuan")  # transformers asks for one image after the other
CONFIGS = {  # with what makes the table small
    "siglip2": (transformers.Siglip2VisionConfig, dict(num_patches=16)),
    "cosmos3": (transformers.Cosmos3EdgeVisionConfig, dict(num_patches=16)),
    "radio": (transformers.RadioConfig, dict(max_img_size=32)),
    "hunyuan": (transformers.HunYuanVLVisionConfig, dict(max_image_size=20)),
}
SIZES = {  # larger and smaller than the table, equal to it, repeated, one token
    "siglip2": [(3, 5), (7, 2), (4, 4), (3, 5), (1, 6)],
    "cosmos3": [(1, 4, 6), (3, 2, 8), (1, 4, 4)],
    "radio": [(4, 6), (9, 1), (8, 8), (4, 6), (1, 1)],
    "hunyuan": [(1, 4, 6), (3, 2, 8), (1, 5, 5), (2, 9, 1)],
}
REPLACED = {f"{cls.__name__}.{name}" for cls, name in TOWERS.values()}
# From 5.24 on, transformers' Siglip2 is no loop over PyTorch's resize any more, but one product.
keeps_bits = lambda kind, mode: (
    mode == MODES[1] and (kind != "siglip2" or TorchVersion(transformers.__version__) < "5.24")
)
by_kind = pytest.mark.parametrize("kind", TOWERS)
by_mode = pytest.mark.parametrize("mode", MODES)


def own_methods():
    return [vars(cls)[name] for cls, name in TOWERS.values()]


def made(kind, **settings):
    """A small tower's embeddings with random weights, in a module around them."""
    config, small = CONFIGS[kind]
    part = TOWERS[kind][0](config(hidden_size=32, patch_size=4, **small, **settings))
    generator = seeded(0)
    for parameter in part.parameters():
        nn.init.normal_(parameter, generator=generator)
    return nn.Sequential(part)


def embed(kind, model, sizes=None, dtype=torch.float32):
    """What the tower embeds of random patches: a padded batch for Siglip2, packed ones for the
    others."""
    sizes = torch.as_tensor(SIZES[kind] if sizes is None else sizes)
    tokens = sizes.long().prod(-1)
    shape = (len(sizes), int(tokens.max()) + 4) if kind == "siglip2" else (int(tokens.sum()),)
    return model[0](pixels((*shape, 48)).to(dtype), sizes)


def pixels(shape):
    return torch.randn(shape, generator=seeded(1))


def table_of(model):
    (found,) = [p for name, p in model.named_parameters() if "position_embedding" in name]
    return found


@by_mode
@by_kind
def test_equals_transformers(kind, mode):
    model = made(kind)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("0.video")]
    want = embed(kind, model)
    want_grads = torch.autograd.grad(want.square().sum(), parameters)
    calls = len(SIZES[kind]) if kind in BY_IMAGE else 1
    with enable(mode, model=model):
        with torch.no_grad():
            plain = [embed(kind, model) for _ in range(3)]  # kept tables too
        got = embed(kind, model)
        grads = torch.autograd.grad(got.square().sum(), parameters)
        assert status().calls == {("pos_embed", mode): 4 * calls}
        assert torch.equal(embed(kind, made(kind)), want)  # another model keeps its own code
        assert status().calls["pos_embed", "stock"] == calls
    for ours in (got, *plain):
        assert ours.dtype == want.dtype
        assert (ours - want).abs().max() <= 2e-6 * max(1.0, table_of(model).abs().max().item())
        assert torch.equal(ours, want) or not keeps_bits(kind, mode)
    assert max(map(relative, grads, want_grads)) <= 1e-5


@by_mode
@pytest.mark.parametrize(("kind", "size"), [("siglip2", (6, 1)), ("cosmos3", (1, 6, 1))])
def test_width_one_is_right_where_a_loop_of_transformers_is_wrong(kind, size, mode):
    model = made(kind, spatial_merge_size=1)
    (truth,) = one_by_one(table_of(model).view(4, 4, 32), [size], mode="bilinear")
    for parameter in model[0].patch_embedding.parameters():
        parameter.data.zero_()

    def error():
        return relative(embed(kind, model, [size]).view(-1, 32)[:6], truth)

    assert (error() > 1e-2) == keeps_bits(kind, "interpolate_cached")
    with running(mode, library="transformers"):
        assert error() <= 1e-6


@pytest.mark.parametrize("half", ["autocast", "model", "table"])
@by_mode
@by_kind
def test_half_precision_is_one_cast_from_float32(kind, mode, half):
    model = made(kind)
    dtype = torch.float32
    if half == "model":
        model.to(torch.bfloat16)
        dtype = table_of(model).dtype
    if half == "table":
        table_of(model).data = table_of(model).data.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        want = embed(kind, model, dtype=dtype)
        with running(mode, library="transformers"):
            got = embed(kind, model, dtype=dtype)
    assert got.dtype == want.dtype
    if half == "table":
        # RADIO and HunYuan-VL cast to the dtype of the tokens; the others round to the table's
        # dtype, and a tie may fall otherwise.
        assert relative(got, want) <= (2e-6 if kind in BY_IMAGE else 2**-8)
        assert (got - want).abs().median() <= 1e-6
    else:
        assert relative(got, want) <= 2**-7
        assert torch.equal(got, want) or half == "model" or not keeps_bits(kind, mode)


@pytest.mark.parametrize(("kind", "breaks"), [("cosmos3", 1), ("radio", 2), ("hunyuan", 2)])
def test_packed_towers_compile(kind, breaks):
    model = made(kind)
    counter = CompileCounter()
    want = embed(kind, model)
    with running(library="transformers"):
        got = embed(kind, nn.Sequential(torch.compile(model[0], backend=counter)))
        assert counter.frame_count <= 1 + breaks
        if kind != "radio":  # given a list of sizes, one graph
            sizes = [list(size) for size in SIZES[kind]]
            tokens = sum(map(math.prod, sizes))
            compiled = torch.compile(model[0], backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(pixels((tokens, 48)), sizes), got)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
def test_hunyuans_other_modes():
    model = made("hunyuan", interpolate_mode="bicubic")
    want = embed("hunyuan", model)
    with running(library="transformers"):
        assert relative(embed("hunyuan", model), want) <= 2e-6
        # It takes no align_corners: transformers' own code raises.
        model[0].config.interpolate_mode = "nearest"
        with pytest.raises(ValueError, match="align_corners"):
            embed("hunyuan", model)
        assert status().fallbacks == {
            "'nearest' is not valid for mode; valid: 'bilinear', 'bicubic'": 1
        }


def test_both_libraries_and_what_is_refused():
    model = made("siglip2")
    vit = small_vit()
    before = own_methods()
    timms = "NaFlexEmbeds._apply_learned_naflex_pos_embed"
    with enable(library=("timm", "transformers")):
        assert {timms, *REPLACED} <= status().replaced.keys()
        with enable("interpolate_cached", library="transformers"):
            assert {status().replaced[name] for name in REPLACED} == {"interpolate_cached"}
            assert status().replaced[timms] == "matmul"
        with enable("interpolate_cached", model=nn.ModuleList([vit, model])):
            for each in (vit, model):
                assert status(each).flags.pos_embed == "interpolate_cached"
    for wrong in (dict(library=("timm", "transformers")), dict(model=model)):
        with pytest.raises(ValueError, match="valid: 'stock', 'matmul', 'interpolate_cached'"):
            enable("grid_sample", **wrong)
    assert own_methods() == before
    assert status().replaced == {}


def test_a_newer_release(monkeypatch):
    if transformers.__version__ != "5.24.0":
        pytest.skip("what a newer release may change is compared with the newest known one")
    monkeypatch.setattr("transformers.__version__", "5.99.0.dev0")
    with enable(library="transformers"):
        assert status().replaced.keys() == REPLACED


TIMM_ALONE = """
import sys, timm, timm_naflex_fast as fast
model = timm.create_model("naflexvit_base_patch16_gap", depth=1)
fast.enable(); fast.enable(model=model); fast.status(); fast.disable()
assert "transformers" not in sys.modules
"""
TRANSFORMERS_FIRST = """
import sys, torch, timm_naflex_fast as fast, wrapt
from transformers import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
wrapt.register_post_import_hook(lambda module: fast.enable(), "timm.models.naflexvit")
model = Siglip2VisionEmbeddings(Siglip2VisionConfig(num_patches=16, patch_size=4))
fast.enable(model=model)
name = "Siglip2VisionEmbeddings.resize_positional_embeddings"
assert name in fast.status().replaced and "timm.models.naflexvit" not in sys.modules
import timm
assert fast.status().flags.pos_embed == "matmul"
assert "NaFlexEmbeds._apply_learned_naflex_pos_embed" in fast.status().replaced
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [TIMM_ALONE, TRANSFORMERS_FIRST])
def test_a_model_of_one_library_does_not_import_another(program):
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


# As frames of one picture, where sizes have no frames, and without them.
WRONG = [(kind, torch.tensor(sizes).float()) for kind, sizes in SIZES.items()]
WRONG += [(kind, torch.tensor([(1, 3, 5), (1, 4, 4)])) for kind in ("siglip2", "radio")]
WRONG += [(kind, torch.tensor([(4, 6), (2, 8)])) for kind in ("cosmos3", "hunyuan")]


def embeds_or_error(kind, model, sizes):
    try:
        return embed(kind, model, sizes)
    except Exception as error:
        return repr(error)


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize(("kind", "sizes"), WRONG)
def test_where_transformers_raises_ours_gives_no_numbers(kind, sizes):
    """Nor does it raise where transformers does not."""
    model = made(kind)
    want = embeds_or_error(kind, model, sizes)
    with enable(library="transformers"):
        got = embeds_or_error(kind, model, sizes)
        assert all("sizes" in reason for reason in status().fallbacks)
    if isinstance(want, str):
        assert got == want
    else:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
