"""What is replaced in timm: who computes each component, as chosen, and that it is counted once."""

import operator
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from timm.layers import patch_embed
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.layers.patch_embed import resample_patch_embed as timms
from timm.models.naflexvit import NaFlexVitCfg
from torch import nn
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.oracles import (
    BATCH,
    OLD_TORCH,
    embed,
    finished_tables,
    relative,
    row_major,
    small_vit,
)
from tests.support.running import running
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patch_embed import kernels
from timm_naflex_fast.patching import decide, library
from timm_naflex_fast.patching import timm as patching
from timm_naflex_fast.resampling import kept

pytestmark = pytest.mark.usefixtures("clean")

PATCHES = torch.randn(2, 6, 6, 5, 1)
COORD = row_major([(2, 3)] * 2)
LINES = torch.randn(1, 2, 6, 9, 3)
IMAGES = torch.randn(1, 3, 12, 9)
SIZE = (6, 9)
BIAS = torch.randn(5)
CALLS = {
    "function": lambda module, w: patch_embed.resample_patch_embed(
        w, [*SIZE], module.interpolation, module.antialias
    ),
    "linear": lambda module, w: module.resample_linear_weight(
        w.permute(0, 2, 3, 1).flatten(1), SIZE
    ),
    "conv": lambda module, w: module.resample_conv_weight(w, SIZE),
    "forward": lambda module, w: module(LINES, w.permute(0, 2, 3, 1).flatten(1), BIAS, SIZE),
    "forward of a convolution": lambda module, w: module(IMAGES, w, BIAS, SIZE, False),
}


def project(model, images=2):
    return embed(model, dict(patches=PATCHES[:images], patch_coord=COORD[:images]))


@pytest.fixture
def model():
    return small_vit(enable_patch_interpolator=True)


def test_frozen_kernels_are_kept_and_never_out_of_date(model, monkeypatch):
    weight = model.requires_grad_(False).embeds.proj.weight
    want = project(model)
    enable(model=model, pos_embed="stock")
    for _ in range(3):
        assert relative(project(model), want) <= 1e-5
    assert finished_tables() == 1
    with monkeypatch.context() as context:
        context.setattr(kernels, "_resample", None)  # kept, so not computed
        before = project(model)
    weight.data.view(-1)[-1:].mul_(1 + 2**-10)  # moves no version counter
    got = project(model)
    kept.clear_all()
    assert not torch.equal(got, before)
    assert torch.equal(got, project(model))
    assert project(model, 0).shape == (0, 6, 32)
    disable()
    assert finished_tables() == 0
    weight.requires_grad_(), enable(model=model), model.embeds(PATCHES, patch_coord=COORD)
    # one that is trained is not kept
    assert status().calls["patch_embed", "matmul"] == 1
    assert finished_tables() == 0


def test_resample_patch_embed_is_replaced_where_it_was_imported_and_put_back(monkeypatch):
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("timm.")]
    holders = [module for module in loaded if vars(module).get("resample_patch_embed") is timms]
    assert len(holders) >= 2  # timm.layers.patch_embed and those that load checkpoints with it
    late = ModuleType("timm.imported_late")
    weight = torch.randn(5, 3, 8, 8)
    monkeypatch.setitem(sys.modules, late.__name__, late)
    want = timms(weight, [6, 10])
    with running(component="patch_embed"):
        late.resample_patch_embed = patch_embed.resample_patch_embed
        enable("stock").restore()  # takes ours off and puts it on again
        assert late.resample_patch_embed is patch_embed.resample_patch_embed is not timms
        late.resample_patch_embed = timms
        enable("matmul").restore()
        for module in (*holders, late):
            assert module.resample_patch_embed is not timms
            assert relative(module.resample_patch_embed(weight, [6, 10]), want) <= 1e-5
        saved = late.resample_patch_embed
    assert all(module.resample_patch_embed is timms for module in (*holders, late))
    monkeypatch.setattr(patch_embed, "resample_patch_embed", lambda *args: saved(*args))
    assert torch.equal(
        patch_embed.resample_patch_embed(weight, [6, 10]), want
    )  # ours, when it is no longer in place


@pytest.mark.skipif(OLD_TORCH, reason="this torch's export refuses constants")
def test_exports_at_a_fixed_size(model):
    with running(model=model, component="patch_embed"), torch.no_grad():
        program = torch.export.export(
            model.embeds, (PATCHES,), dict(patch_coord=COORD), strict=False
        ).module()
    others = dict(patches=torch.randn(2, 6, 6, 5, 1), patch_coord=COORD)
    assert relative(embed(SimpleNamespace(embeds=program), others), embed(model, others)) <= 1e-5


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", [("bicubic", True), ("bilinear", False)])
@pytest.mark.parametrize("who", ["matmul", "stock"])
def test_who_resamples_a_kernel(who, how, call, monkeypatch):
    """Ours or timm's own code, as chosen; counted once, and not done by the other one too."""
    module = PatchEmbedInterpolator((8, 8), 3, 5, *how)
    weight = torch.randn(5, 3, 8, 8)
    want = CALLS[call](module, weight)
    ran = []
    for name in ("resample_patch_kernel", "resample_linear_kernel"):
        ours = getattr(patching, name)
        monkeypatch.setattr(
            patching, name, lambda *a, ours=ours, **k: ran.append(1) or ours(*a, **k)
        )
    enable("matmul", patch_embed=who)
    assert relative(CALLS[call](module, weight), want) <= 1e-5
    assert status().calls == {("patch_embed", who): 1}
    assert len(ran) == (who == "matmul")
    assert status().fallbacks == {}


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("call", CALLS)
def test_a_mode_that_is_not_separable_is_left_to_timm(call):
    module = PatchEmbedInterpolator((8, 8), 3, 5, "nearest", False)
    weight = torch.randn(5, 3, 8, 8)
    module.interpolation = (
        "bicubic" if call == "forward" and hasattr(module, "resampler") else "nearest"
    )
    enable()
    with pytest.raises(ValueError, match="align_corners option"):  # by F.interpolate, as without us
        CALLS[call](module, weight)
    assert status().fallbacks == {"a patch kernel with interpolation mode 'nearest'": 1}
    enable()
    with pytest.raises(ValueError, match="align_corners option"):
        embed(small_vit(pos_embed_interp_mode="nearest"))
    (why,) = status().fallbacks
    assert why.startswith("a position table (replaced are bilinear, bicubic)")
    assert why.endswith("with interpolation mode 'nearest'")


def test_kernels_of_other_shapes_and_patches_of_the_kernels_own_size_are_left_to_timm():
    module = PatchEmbedInterpolator((8, 8), 3, 5)
    weight = torch.randn(5, 192)
    patches = torch.randn(2, 7, 8, 8, 3)
    want = module(patches, weight)
    resampler = getattr(module, "resampler", patch_embed.resample_patch_embed)
    enable()
    for function in (patch_embed.resample_patch_embed, resampler):
        for wrong, size in ((torch.randn(3, 8, 8), [6, 9]), (torch.randn(5, 3, 8, 8), [6])):
            with pytest.raises(AssertionError):
                function(wrong, size)
    if hasattr(module, "resampler"):
        with pytest.raises(AssertionError):
            resampler(torch.randn(5, 3, 8, 7), [6, 9])
    for size in (None, (8, 8)):
        assert torch.equal(module(patches, weight, patch_size=size), want)
    assert status().calls == {}


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize(
    ("mode", "flagged", "who", "plain"),
    [
        ("matmul", False, "matmul", "matmul"),
        ("interpolate_cached", False, "interpolate_cached", "interpolate_cached"),
        ("grid_sample", False, "grid_sample", "stock"),
        ("matmul", True, "grid_sample", "matmul"),
        ("grid_sample", True, "grid_sample", "stock"),
        ("interpolate_cached", True, "stock", "interpolate_cached"),
    ],
)
def test_who_computes_the_position_embeddings(kind, mode, flagged, who, plain, monkeypatch):
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    want = embed(model)
    enable(mode)
    got = [embed(model) for _ in range(2)]
    assert status().calls == {("pos_embed", who): 2}
    assert status().fallbacks == {}
    if flagged:  # a model keeps the result that it was made for
        torch.testing.assert_close(got, [want, want], atol=5e-6, rtol=0)
    enable(mode), model.embeds(torch.zeros(1, 1, 24, 28))
    assert status().calls == {("pos_embed", plain): 1}
    suffix = "_grid_sample" if flagged else ""
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_naflex_pos_embed{suffix}"] == who
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_pos_embed"] == plain
    monkeypatch.setattr(decide, "context_of", lambda *_: "export")
    enable(mode), embed(model), model.embeds(torch.zeros(1, 1, 24, 28))
    assert status().calls == Counter([("pos_embed", who), ("pos_embed", plain)])


@pytest.mark.skipif(
    patching.TIMM_REFERENCE != "grid_sample", reason="the flag of older timm cannot be vmapped"
)
def test_fallbacks_are_named_and_the_chosen_result_is_kept():
    model = small_vit().requires_grad_(False)
    patches = BATCH["patches"]
    coord = BATCH["patch_coord"]

    def by_sample(patches, coord, suffix=""):
        x = model.embeds.proj(patches[None])
        getattr(model.embeds, f"_apply_learned_naflex_pos_embed{suffix}")(x, coord[None])
        return x[0]

    want = torch.stack([by_sample(*sample, "_grid_sample") for sample in zip(patches, coord)])
    enable("grid_sample")
    with pytest.warns(UserWarning, match="transform stays with timm's own") as said:
        for times in ("1 time", "2 times"):
            # timm's own code of the flag, not that of its default.
            got = torch.func.vmap(by_sample)(patches, coord)
            torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
            assert f"\nthe library's own code ran {times}: a torch.func transform" in str(status())
    assert len(said) == 1
    assert status().calls == {("pos_embed", "stock"): 2}
    assert status().fallbacks == {"a torch.func transform": 2}


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("mode", ["stock", "matmul", "interpolate_cached", "grid_sample"])
def test_a_parametrized_table_is_computed_as_often_as_by_timm_or_once(mode, flagged, kind):
    """Spectral norm, weight norm and LoRA compute it at each reading; the first also changes its
    state then."""
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    other = small_vit()
    computed = Counter()
    names = ["pos_embed"] if kind == "learned" else ["pos_embed_y", "pos_embed_x"]
    for name in names:
        twice = nn.Module()
        twice.forward = lambda table, name=name: (computed.update([name]), table * 2)[1]
        parametrize.register_parametrization(model.embeds, name, twice)

    def times(run):
        computed.clear(), run()
        return computed.copy()

    def transformed():
        x = model.embeds.proj(BATCH["patches"])
        add = getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")
        torch.func.grad(lambda x: (add(x.mul(1), patch_coord=BATCH["patch_coord"]), x.sum())[1])(x)

    by_mode = patching.AS_GRID_SAMPLE if flagged else patching.AS_CHOSEN
    runs = (
        (lambda: embed(model), by_mode),
        (lambda: model.embeds(torch.zeros(1, 1, 24, 28)), library.AS_INTERPOLATE),
    )
    for run, by_mode in (*runs, (transformed, None)):
        timms = times(run)
        (
            enable("matmul", model=other),
            enable(mode),
        )  # the first so that ours is in place when timm's own is chosen
        ran = times(run)
        (strategy,) = {strategy for _, strategy in status().calls}
        assert by_mode is None or strategy == by_mode.get(mode, "stock")
        # Where ours cannot run, "grid_sample" calls timm's method of that name, which computes the
        # table once.
        assert ran == Counter(names) or (strategy == "stock" and ran == timms), (strategy, timms)
        disable()


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize(
    "method", ["embeds._apply_learned_naflex_pos_embed", "_generate_rope_naflex"]
)
def test_coordinates_are_asked_as_x_is(method):
    rope = dict(rope_type="axial") if method.startswith("_") else {}
    if rope and not hasattr(NaFlexVitCfg, "rope_type"):
        pytest.skip("this timm's NaFlexVit has no rotary embeddings")
    model = small_vit(**rope)

    def result():
        x = torch.zeros(2, 6, 32)
        found = operator.attrgetter(method)(model)(x, TwoTensor(COORD, COORD.clone()))
        return torch.as_tensor(x if found is None else found)

    want = result()
    with enable(), torch.no_grad():
        torch.testing.assert_close(result(), want)
        assert status().calls == {("rope" if rope else "pos_embed", "stock"): 1}
        (why,) = status().fallbacks
    assert why == "a tensor of the class TwoTensor"
