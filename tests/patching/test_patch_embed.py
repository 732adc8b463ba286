"""Separable pseudo-inverses: against float64, twice differentiable, kept while frozen, everywhere timm uses them."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from oracles import PRISTINE, finished_tables, relative, row_major, small_vit
from timm.layers import patch_embed
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.layers.patch_embed import resample_patch_embed as timms

import timm_naflex_fast
from timm_naflex_fast.functional import resample_patch_kernel
from timm_naflex_fast.patching import timm as patching
from timm_naflex_fast.resampling import cache
from timm_naflex_fast.resampling.matrices import resize_matrix

STOCK = PRISTINE[PatchEmbedInterpolator]
side = st.integers(4, 24)


def truth(weight, size, mode, antialias):
    """k' = pinv(A_h)^T k pinv(A_w) in float64."""
    h, w = size
    rows, cols = weight.shape[2:]
    left = torch.linalg.pinv(resize_matrix(h, rows, mode, antialias, dtype=torch.float64)).t()
    right = torch.linalg.pinv(resize_matrix(w, cols, mode, antialias, dtype=torch.float64))
    return left @ weight.double() @ right


@given(st.tuples(side, side), st.tuples(side, side), st.sampled_from(["bilinear", "bicubic"]), st.booleans())
def test_no_farther_from_float64_than_timm(old, new, mode, antialias):
    weight = torch.randn(8, 3, *old)
    exact = truth(weight, new, mode, antialias)
    got = resample_patch_kernel(weight, new, mode=mode, antialias=antialias)
    assert relative(got, exact) <= 1e-6
    try:
        theirs = timms(weight, list(new), interpolation=mode, antialias=antialias)
    except torch.linalg.LinAlgError:  # its SVD does not always converge: (23, 23) -> (24, 23), bilinear
        reject()
    assert relative(got, exact) <= relative(theirs, exact) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("old, new", [((48, 25), (29, 48)), ((37, 32), (16, 41)), ((4, 46), (45, 5))])
def test_no_farther_from_float64_than_timm_on_long_sides(old, new):
    weight = torch.randn(8, 3, *old)
    exact = truth(weight, new, "bicubic", True)
    got, theirs = relative(resample_patch_kernel(weight, new), exact), relative(timms(weight, list(new)), exact)
    assert got <= min(theirs, 1e-6)


def test_timms_matrix_is_wrong_for_a_new_width_of_one_and_ours_is_not():
    weight = torch.randn(8, 3, 8, 8)
    exact = truth(weight, (5, 1), "bicubic", True)
    assert relative(resample_patch_kernel(weight, (5, 1)), exact) <= 1e-6


@pytest.mark.parametrize("new", [(3, 5), (6, 4), (4, 7)])
def test_differentiable_twice(new):
    weight = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: resample_patch_kernel(k, new), weight)
    assert torch.autograd.gradgradcheck(lambda k: resample_patch_kernel(k, new).square(), weight)


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
    timm_naflex_fast.enable(model=model, pos_embed="stock")
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
    timm_naflex_fast.disable()
    assert finished_tables() == 0


@pytest.mark.usefixtures("clean")
@pytest.mark.ran("patch_embed=matmul")
def test_a_weight_that_is_trained_is_not_kept(model):
    timm_naflex_fast.enable(model=model)
    project(model, (6, 5)).sum().backward()
    assert finished_tables() == 0 and model.embeds.proj.weight.grad.abs().max() > 0


@pytest.mark.usefixtures("clean")
def test_an_empty_batch(model):
    timm_naflex_fast.enable(model=model, pos_embed="stock")
    assert project(model, (6, 5), batch=0).shape == (0, 6, 32)


@pytest.mark.ran("patch_embed=matmul")
def test_resample_patch_embed_is_replaced_where_it_was_imported_and_put_back():
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("timm.") and getattr(module, "__dict__", {}).get("resample_patch_embed") is timms
    ]
    assert len(holders) >= 2  # timm.layers.patch_embed and those that load checkpoints with it
    weight = torch.randn(5, 3, 8, 8)
    want = timms(weight, [6, 10])
    with timm_naflex_fast.enable():
        for module in holders:
            assert module.resample_patch_embed is not timms
            assert relative(module.resample_patch_embed(weight, [6, 10]), want) <= 1e-5
    assert all(module.resample_patch_embed is timms for module in holders)


def test_a_module_that_imports_the_function_while_it_is_replaced_gets_timms_back(monkeypatch):
    late = ModuleType("timm.imported_late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with timm_naflex_fast.enable():
        late.resample_patch_embed = patch_embed.resample_patch_embed
        assert late.resample_patch_embed is not timms
    assert late.resample_patch_embed is timms


@pytest.mark.usefixtures("clean")
@pytest.mark.ran("patch_embed=matmul")
def test_compiles_in_one_graph_at_a_fixed_size(model):
    model.requires_grad_(False)
    want = project(model, (6, 5))
    timm_naflex_fast.enable(model=model)
    interpolator, weight = model.embeds.patch_interpolator, model.embeds.proj.weight

    @torch.compile(backend="eager", fullgraph=True)
    def compiled():
        return interpolator.resample_linear_weight(weight, (6, 5))

    timm = STOCK["resample_linear_weight"](interpolator, weight, (6, 5))
    assert relative(compiled(), timm) <= 1e-5 and want.isfinite().all()


class FixedSize(torch.nn.Module):
    def __init__(self, embeds):
        super().__init__()
        self.embeds = embeds

    def forward(self, patches, patch_coord):
        out = self.embeds(patches, patch_coord=patch_coord)
        return out[0] if isinstance(out, tuple) else out


def test_exports_at_a_fixed_size(model):
    timm_naflex_fast.enable(model=model)
    patches, coord = torch.randn(2, 6, 6, 5, 1), row_major([(2, 3)] * 2)
    with torch.no_grad():
        program = torch.export.export(FixedSize(model.embeds), (patches, coord), strict=False)
    timm_naflex_fast.disable(model)
    others = torch.randn(2, 6, 6, 5, 1)
    assert relative(program.module()(others, coord), FixedSize(model.embeds)(others, coord)) <= 1e-5


@pytest.mark.ran("patch_embed=matmul")
def test_training_on_many_patch_sizes_has_timms_losses():
    def losses(mode):
        model = small_vit(enable_patch_interpolator=True, patch_size=16)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(0)
        found = []
        with timm_naflex_fast.enable(mode):
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


@pytest.mark.parametrize("new", [(5, 6), (3, 4)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_in_one_call(new, create_graph):
    weight = torch.randn(3, 2, 4, 4, requires_grad=True)
    out = resample_patch_kernel(weight, new)
    upstream = torch.randn(5, *out.shape)
    together = torch.autograd.grad(out, weight, upstream, is_grads_batched=True, create_graph=create_graph)[0]
    in_turn = torch.stack([torch.autograd.grad(out, weight, g, retain_graph=True)[0] for g in upstream])
    assert relative(together, in_turn) <= 1e-6


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians(strategy):
    weight = torch.randn(3, 2, 4, 4)

    def resampled(weight):
        return resample_patch_kernel(weight, (5, 6))

    want = torch.autograd.functional.jacobian(resampled, weight)
    got = torch.autograd.functional.jacobian(resampled, weight, vectorize=True, strategy=strategy)
    transform = torch.func.jacrev if strategy == "reverse-mode" else torch.func.jacfwd
    assert relative(got, want) <= 1e-6 and relative(transform(resampled)(weight), want) <= 1e-6


LAYOUTS = {
    "channels last": lambda: torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last),
    "slice": lambda: torch.randn(6, 5, 9, 10)[:, :3, :8, 2:],
    "transposed": lambda: torch.randn(6, 3, 8, 8).transpose(2, 3),
    "expanded": lambda: torch.randn(6, 1, 8, 8).expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_not_contiguous(layout):
    weight = LAYOUTS[layout]()
    for new in ((5, 6), (8, 6), (6, 8), (8, 8)):
        assert torch.equal(resample_patch_kernel(weight, new), resample_patch_kernel(weight.contiguous(), new))


@pytest.mark.usefixtures("clean")
def test_a_frozen_weight_can_be_swapped_after_its_kernel_was_kept(model):
    """As ``torch.__future__.set_swap_module_params_on_conversion`` asks for; weak references would forbid it."""
    model.requires_grad_(False)
    timm_naflex_fast.enable(model=model, pos_embed="stock")
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


@pytest.mark.usefixtures("clean")
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
    timm_naflex_fast.enable("matmul", patch_embed=who)
    assert relative(CALLS[call](module, weight), want) <= 1e-5
    assert timm_naflex_fast.status().calls == {("patch_embed", who): 1} and len(ran) == (who == "matmul")
    assert timm_naflex_fast.status().fallbacks == {}


@pytest.mark.usefixtures("clean")
def test_kernels_of_other_shapes_are_left_to_timm():
    resampler = getattr(PatchEmbedInterpolator((8, 8), 3, 5), "resampler", None)
    timm_naflex_fast.enable()
    wrong = [(torch.randn(3, 8, 8), [6, 9]), (torch.randn(5, 3, 8, 8), [6])]
    for function in [patch_embed.resample_patch_embed, *([resampler] if resampler else [])]:
        for weight, size in wrong:
            with pytest.raises(AssertionError):
                function(weight, size)
    if resampler:
        with pytest.raises(AssertionError):
            resampler(torch.randn(5, 3, 8, 7), [6, 9])
    assert timm_naflex_fast.status().calls == {}


@pytest.mark.usefixtures("clean")
@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("call", CALLS)
def test_a_mode_that_is_not_separable_is_left_to_timm(call):
    module, weight = PatchEmbedInterpolator((8, 8), 3, 5, "nearest", False), torch.randn(5, 3, 8, 8)
    timm_naflex_fast.enable()
    with pytest.raises(ValueError, match="align_corners option"):  # by F.interpolate, as without us
        CALLS[call](module, weight)
    assert timm_naflex_fast.status().fallbacks == {"a patch kernel with interpolation mode 'nearest'": 1}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("everywhere, own", [("matmul", "stock"), ("stock", "matmul")])
def test_a_models_own_choice_holds_for_its_kernels(model, everywhere, own):
    interpolator, weight = model.embeds.patch_interpolator, model.embeds.proj.weight
    timm_naflex_fast.enable(everywhere)
    timm_naflex_fast.enable(own, model=model)
    interpolator.resample_linear_weight(weight, (6, 5))
    assert set(timm_naflex_fast.status().calls) == {("patch_embed", own)}


@pytest.mark.usefixtures("clean")
def test_patches_of_the_kernels_own_size_are_left_to_timm():
    module, weight = PatchEmbedInterpolator((4, 5), 3, 5), torch.randn(5, 60)
    patches = torch.randn(2, 7, 60)
    want = module(patches, weight)
    timm_naflex_fast.enable()
    for size in (None, (4, 5)):
        assert torch.equal(module(patches, weight, patch_size=size), want)
    assert timm_naflex_fast.status().calls == {}
