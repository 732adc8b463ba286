"""What is replaced in timm: who computes each component, as chosen, and that it is counted once."""

import sys
from types import ModuleType

import pytest
import torch
from timm.layers import patch_embed
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.layers.patch_embed import resample_patch_embed as timms
from torch import nn
from torch.nn.utils import parametrize

from tests.support.oracles import BATCH, NEW_TIMM, PRISTINE, embed, finished_tables, relative, row_major, small_vit
from tests.support.running import running
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import timm as patching
from timm_naflex_fast.resampling import cache

pytestmark = pytest.mark.usefixtures("clean")

STOCK = PRISTINE[PatchEmbedInterpolator]


def project(model, size, batch=2):
    patches = torch.randn(batch, 6, *size, 1, generator=torch.Generator().manual_seed(1))
    out = model.embeds(patches, patch_coord=row_major([(2, 3)] * batch) if batch else torch.zeros(0, 6, 2).long())
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def model():
    return small_vit(enable_patch_interpolator=True)


@pytest.mark.parametrize("write", ["data", "version", "last bit"])
def test_frozen_kernels_are_kept_and_never_out_of_date(model, write, monkeypatch):
    model.requires_grad_(False)
    weight = model.embeds.proj.weight
    want = project(model, (6, 5))
    enable(model=model, pos_embed="stock")
    for _ in range(3):
        assert relative(project(model, (6, 5)), want) <= 1e-5
    assert finished_tables() == 1
    with monkeypatch.context() as context:
        context.setattr(PatchEmbedInterpolator, "resample_linear_weight", None)  # kept, so not asked for
        project(model, (6, 5))
    kept = project(model, (6, 5))
    if write == "data":
        weight.data.mul_(2)
    elif write == "version":
        weight.mul_(2)
    else:
        weight.data.view(-1)[-1:].mul_(1 + 2**-10)
    got = project(model, (6, 5))
    assert not torch.equal(got, kept)
    cache.clear_all()
    assert torch.equal(got, project(model, (6, 5)))
    disable()
    assert finished_tables() == 0


def test_a_weight_that_is_trained_is_not_kept(model):
    enable(model=model)
    project(model, (6, 5)).sum().backward()
    assert status().calls["patch_embed", "matmul"] == 1
    assert finished_tables() == 0 and model.embeds.proj.weight.grad.abs().max() > 0


def test_an_empty_batch(model):
    enable(model=model, pos_embed="stock")
    assert project(model, (6, 5), batch=0).shape == (0, 6, 32)
    assert status().calls["patch_embed", "matmul"] == 1


def test_resample_patch_embed_is_replaced_where_it_was_imported_and_put_back():
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("timm.") and getattr(module, "__dict__", {}).get("resample_patch_embed") is timms
    ]
    assert len(holders) >= 2  # timm.layers.patch_embed and those that load checkpoints with it
    weight = torch.randn(5, 3, 8, 8)
    want = timms(weight, [6, 10])
    with running(component="patch_embed"):
        for module in holders:
            assert module.resample_patch_embed is not timms
            assert relative(module.resample_patch_embed(weight, [6, 10]), want) <= 1e-5
    assert all(module.resample_patch_embed is timms for module in holders)


def test_a_module_that_imports_the_function_while_it_is_replaced_gets_timms_back(monkeypatch):
    late = ModuleType("timm.imported_late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with enable():
        late.resample_patch_embed = patch_embed.resample_patch_embed
        assert late.resample_patch_embed is not timms
    assert late.resample_patch_embed is timms


def test_compiles_in_one_graph_at_a_fixed_size(model):
    model.requires_grad_(False)
    want = project(model, (6, 5))
    interpolator, weight = model.embeds.patch_interpolator, model.embeds.proj.weight
    timm = STOCK["resample_linear_weight"](interpolator, weight, (6, 5))
    enable(model=model)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled():
        return interpolator.resample_linear_weight(weight, (6, 5))

    assert relative(compiled(), timm) <= 1e-5 and want.isfinite().all()
    assert set(status().calls) == {("patch_embed", "matmul")}


class FixedSize(torch.nn.Module):
    def __init__(self, embeds):
        super().__init__()
        self.embeds = embeds

    def forward(self, patches, patch_coord):
        out = self.embeds(patches, patch_coord=patch_coord)
        return out[0] if isinstance(out, tuple) else out


def test_exports_at_a_fixed_size(model):
    enable(model=model)
    patches, coord = torch.randn(2, 6, 6, 5, 1), row_major([(2, 3)] * 2)
    with torch.no_grad():
        program = torch.export.export(FixedSize(model.embeds), (patches, coord), strict=False)
    assert status().calls["patch_embed", "matmul"]
    disable(model)
    others = torch.randn(2, 6, 6, 5, 1)
    assert relative(program.module()(others, coord), FixedSize(model.embeds)(others, coord)) <= 1e-5


def test_training_on_many_patch_sizes_has_timms_losses():
    def losses(mode):
        model = small_vit(enable_patch_interpolator=True, patch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(0)
        found = []
        with running(mode, component="patch_embed"):
            for patch in (8, 12, 16, 20, 32, 8, 20, 12, 32):
                patches = torch.randn(2, 12, patch, patch, 1, generator=generator)
                batch = dict(
                    patches=patches, patch_coord=row_major([(3, 4), (2, 6)]), patch_valid=torch.ones(2, 12).bool()
                )
                loss = torch.nn.functional.cross_entropy(model(batch), torch.tensor([1, 3]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    assert losses("matmul") == pytest.approx(losses("stock"), abs=1e-4)


def test_a_frozen_weight_can_be_swapped_after_its_kernel_was_kept(model):
    """As ``torch.__future__.set_swap_module_params_on_conversion`` asks for; weak references would forbid it."""
    model.requires_grad_(False)
    enable(model=model, pos_embed="stock")
    project(model, (6, 5))
    assert finished_tables() == 1
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    patches = torch.randn(2, 6, 6, 5, 1).double()
    out = model.embeds(patches, patch_coord=row_major([(2, 3)] * 2))
    assert (out[0] if isinstance(out, tuple) else out).dtype is torch.float64


CALLS = {
    "function": lambda module, weight: patch_embed.resample_patch_embed(
        weight, [6, 9], module.interpolation, module.antialias
    ),
    "linear": lambda module, weight: module.resample_linear_weight(weight.permute(0, 2, 3, 1).flatten(1), (6, 9)),
    "conv": lambda module, weight: module.resample_conv_weight(weight, (6, 9)),
    "forward": lambda module, weight: module(
        torch.ones(1, 2, 6, 9, 3), weight.permute(0, 2, 3, 1).flatten(1), patch_size=(6, 9)
    ),
    "forward of a convolution": lambda module, weight: module(
        torch.ones(1, 3, 6, 9), weight, patch_size=(6, 9), is_linear=False
    ),
}


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", [("bicubic", True), ("bilinear", False)])
@pytest.mark.parametrize("who", ["matmul", "stock"])
def test_who_resamples_a_kernel(who, how, call, monkeypatch):
    """Ours or timm's own code, as chosen; counted once, and not done by the other one too."""
    module, weight = PatchEmbedInterpolator((8, 8), 3, 5, *how), torch.randn(5, 3, 8, 8)
    want, ran = CALLS[call](module, weight), []
    for name in ("resample_patch_kernel", "resample_linear_kernel"):
        ours = getattr(patching, name)
        monkeypatch.setattr(patching, name, lambda *a, ours=ours, **k: ran.append(1) or ours(*a, **k))
    enable("matmul", patch_embed=who)
    assert relative(CALLS[call](module, weight), want) <= 1e-5
    assert status().calls == {("patch_embed", who): 1} and len(ran) == (who == "matmul")
    assert status().fallbacks == {}


def test_kernels_of_other_shapes_are_left_to_timm():
    resampler = getattr(PatchEmbedInterpolator((8, 8), 3, 5), "resampler", None)
    enable()
    wrong = [(torch.randn(3, 8, 8), [6, 9]), (torch.randn(5, 3, 8, 8), [6])]
    for function in [patch_embed.resample_patch_embed, *([resampler] if resampler else [])]:
        for weight, size in wrong:
            with pytest.raises(AssertionError):
                function(weight, size)
    if resampler:
        with pytest.raises(AssertionError):
            resampler(torch.randn(5, 3, 8, 7), [6, 9])
    assert status().calls == {}


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("call", CALLS)
def test_a_mode_that_is_not_separable_is_left_to_timm(call):
    module, weight = PatchEmbedInterpolator((8, 8), 3, 5, "nearest", False), torch.randn(5, 3, 8, 8)
    enable()
    with pytest.raises(ValueError, match="align_corners option"):  # by F.interpolate, as without us
        CALLS[call](module, weight)
    assert status().fallbacks == {"a patch kernel with interpolation mode 'nearest'": 1}


@pytest.mark.parametrize("everywhere, own", [("matmul", "stock"), ("stock", "matmul")])
def test_a_models_own_choice_holds_for_its_kernels(model, everywhere, own):
    interpolator, weight = model.embeds.patch_interpolator, model.embeds.proj.weight
    enable(everywhere)
    enable(own, model=model)
    interpolator.resample_linear_weight(weight, (6, 5))
    assert set(status().calls) == {("patch_embed", own)}


def test_patches_of_the_kernels_own_size_are_left_to_timm():
    module, weight = PatchEmbedInterpolator((4, 5), 3, 5), torch.randn(5, 60)
    patches = torch.randn(2, 7, 60)
    want = module(patches, weight)
    enable()
    for size in (None, (4, 5)):
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
def test_who_computes_the_position_embeddings(kind, mode, flagged, who, plain):
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    enable(mode)
    embed(model), embed(model)
    assert status().calls == {("pos_embed", who): 2} and status().fallbacks == {}
    enable(mode)
    model.embeds(torch.zeros(1, 1, 24, 28))
    assert status().calls == {("pos_embed", plain): 1}
    suffix = "_grid_sample" if flagged else ""
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_naflex_pos_embed{suffix}"] == who
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_pos_embed"] == plain


@pytest.mark.skipif(not NEW_TIMM, reason="an older interpolator has no resampler")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("who", ["matmul", "stock"])
def test_patch_kernels_and_rotary_tables(who, frozen):
    model = small_vit(enable_patch_interpolator=True, rope_type="axial").requires_grad_(not frozen)
    other = small_vit()
    enable(model=other)  # so that ours is in place when timm's own is chosen
    with enable("matmul" if who == "matmul" else "stock"):
        batch = dict(patches=torch.randn(1, 6, 3, 5, 1), patch_coord=row_major([(2, 3)]))
        for _ in range(3):
            model(batch | {"patch_valid": torch.ones(1, 6).bool()})
        rope = "batched" if who == "matmul" else "stock"
        assert status().calls == {("pos_embed", who): 3, ("patch_embed", who): 3, ("rope", rope): 3}


@pytest.mark.skipif(patching.TIMM_SAMPLER != "grid_sample", reason="the flag of older timm cannot be vmapped")
def test_fallbacks_are_named_and_the_chosen_result_is_kept():
    model = small_vit().requires_grad_(False)
    patches, coord = BATCH["patches"], BATCH["patch_coord"]

    def by_sample(patches, coord):
        x = model.embeds.proj(patches[None])
        model.embeds._apply_learned_naflex_pos_embed_grid_sample(x, coord[None])
        return x

    want = torch.stack([by_sample(p, c)[0] for p, c in zip(patches, coord)])
    enable("grid_sample")

    def default(patches, coord):
        x = model.embeds.proj(patches[None])
        model.embeds._apply_learned_naflex_pos_embed(x, coord[None])
        return x[0]

    got = torch.func.vmap(default)(patches, coord)  # timm's own code of the flag, not that of its default
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert status().calls == {("pos_embed", "stock"): 1} and status().fallbacks == {"a torch.func transform": 1}
    assert "ran 1 time: a torch.func transform" in str(status())


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_while_tracing_plain_images_alone_are_left_to_timm(kind, monkeypatch):
    model = small_vit(pos_embed=kind)
    monkeypatch.setattr(patching, "recorded", lambda: True)
    monkeypatch.setattr(patching, "tracer", lambda: "export")
    enable()
    embed(model)
    assert status().calls == {("pos_embed", "matmul"): 1}
    model.embeds(torch.randn(2, 1, 20, 36))
    assert status().calls == {("pos_embed", "matmul"): 1, ("pos_embed", "stock"): 1}


class Counted(nn.Module):
    """A parametrization that counts how often the table is computed."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, table):
        self.times += 1
        return table * 2


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("mode", ["stock", "matmul", "interpolate_cached", "grid_sample"])
def test_a_parametrized_table_is_computed_as_often_as_by_timm_or_once(mode, flagged, kind):
    """Spectral norm, weight norm and LoRA compute it at each reading; the first also changes its state then."""
    model, other, counted = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged), small_vit(), []
    for name in ("pos_embed",) if kind == "learned" else ("pos_embed_y", "pos_embed_x"):
        counted.append(Counted())
        parametrize.register_parametrization(model.embeds, name, counted[-1])

    def times(run):
        for each in counted:
            each.times = 0
        run()
        return [each.times for each in counted]

    def transformed():
        x, coord = model.embeds.proj(BATCH["patches"]), BATCH["patch_coord"]
        add = getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")
        torch.func.grad(lambda x: (add(x.mul(1), patch_coord=coord), x.sum())[1])(x)

    for run in (lambda: embed(model), lambda: model.embeds(torch.zeros(1, 1, 24, 28)), transformed):
        timms, once = times(run), [1] * len(counted)
        enable("matmul", model=other)  # so that ours is in place when timm's own is chosen
        enable(mode)
        ran = times(run)
        (impl,) = {impl for _, impl in status().calls}
        # Where ours cannot run, "grid_sample" calls timm's method of that name, which computes the table once.
        assert ran == once or (impl == "stock" and ran == timms), (impl, timms)
        disable()
