"""What is replaced in timm: who computes each component, as chosen, and that it is counted once."""

from itertools import product, starmap
from types import MethodType

import pytest
import torch
import wrapt
from timm.layers.patch_embed import PatchEmbedInterpolator, PatchEmbedResamplerFixedOrigSize
from timm.models import naflexvit
from torch import nn
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.checks import slow
from tests.support.oracles import (
    BATCH,
    embed,
    relative,
    row_major,
    small_vit,
)
from timm_naflex_fast import enable, status

pytestmark = pytest.mark.usefixtures("clean")
SAMPLES_AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")
COORD = row_major([(2, 3)] * 2)
# timm before 1.0.29 resamples patch kernels by a function, which stays its own.
REPLACES_KERNELS = hasattr(PatchEmbedInterpolator((8, 8), 3, 5), "resampler")
of_kernels = pytest.mark.skipif(not REPLACES_KERNELS, reason="this timm's kernels stay its own")


def kernel_of(module, weight):
    """What a PatchEmbedInterpolator computes with kernels (5, 3, 8, 8), of patches of (6, 9)."""
    linear = weight.permute(0, 2, 3, 1).flatten(1)
    return module(torch.ones(1, 2, 6, 9, 3), linear, torch.ones(5), (6, 9))


@of_kernels
@pytest.mark.parametrize("how", [("bicubic", True), ("bilinear", False)])
@pytest.mark.parametrize("who", ["matmul", "stock"])
def test_who_resamples_a_kernel(who, how):
    """Ours or timm's own code, as chosen; counted once; and what is kept is never out of date."""
    module = PatchEmbedInterpolator((8, 8), 3, 5, *how)
    weight = torch.randn(5, 3, 8, 8)
    for _ in range(2):
        want = kernel_of(module, weight)
        with enable("matmul", patch_embed=who, model=module):
            for _ in range(3):  # kept from the second call on
                assert relative(kernel_of(module, weight), want) <= 1e-5
            assert status().calls == {("patch_embed", who): 3}
            assert status().fallbacks == {}
        weight.data.view(-1)[:64].mul_(2)  # moves no version counter


@of_kernels
@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
def test_a_kernel_whose_mode_is_not_separable_is_left_to_timm():
    module = PatchEmbedInterpolator((8, 8), 3, 5, "nearest", False)
    enable()
    with pytest.raises(ValueError, match="align_corners option"):  # timm's own, by F.interpolate
        kernel_of(module, torch.randn(5, 3, 8, 8))
    assert status().fallbacks == {"a patch kernel with interpolation mode 'nearest'": 1}


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize(
    ("mode", "flagged", "who", "plain"),
    [
        ("matmul", False, "matmul", "matmul"),
        ("interpolate_cached", False, "interpolate_cached", "interpolate_cached"),
        ("grid_sample", False, "grid_sample", "matmul"),
        ("matmul", True, "grid_sample", "matmul"),
        ("grid_sample", True, "grid_sample", "matmul"),
        ("interpolate_cached", True, "stock", "interpolate_cached"),
    ],
)
def test_who_computes_the_position_embeddings(kind, mode, flagged, who, plain):
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    want = embed(model)
    enable(mode)
    got = embed(model)
    assert status().calls == {("pos_embed", who): 1}
    assert status().fallbacks == {}
    if flagged or mode != "grid_sample":  # a model keeps the result that it was made for
        torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    enable(mode), model.embeds(torch.zeros(1, 1, 24, 28))
    assert status().calls == {("pos_embed", plain): 1}
    suffix = "_grid_sample" if flagged else ""
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_naflex_pos_embed{suffix}"] == who
    assert status().replaced[f"NaFlexEmbeds._apply_{kind}_pos_embed"] == plain


@pytest.mark.skipif(not SAMPLES_AT_COORDINATES, reason="the flag of older timm cannot be vmapped")
def test_fallbacks_are_named_and_the_chosen_result_is_kept():
    embeds = small_vit().requires_grad_(False).embeds
    samples = BATCH["patches"], BATCH["patch_coord"]

    def by_sample(patches, coord, suffix=""):
        x = embeds.proj(patches[None])
        getattr(embeds, f"_apply_learned_naflex_pos_embed{suffix}")(x, coord[None])
        return x[0]

    want = torch.stack([by_sample(*sample, "_grid_sample") for sample in zip(*samples)])
    enable("grid_sample")
    reason = "a torch.func transform"
    with pytest.warns(UserWarning, match=f"{reason} stays with timm's own code") as said:
        for times in (1, 2):
            # timm's own code of the flag, not that of its default.
            got = torch.func.vmap(by_sample)(*samples)
            torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
            assert status().calls == {("pos_embed", "stock"): times}
            assert status().fallbacks == {reason: times}
            assert f"\nthe library's own code ran ({times} x): {reason}" in str(status())
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("flagged", [False, True])
def test_a_parametrized_table_is_computed_once(flagged, kind):
    """Spectral norm, weight norm and LoRA compute it at each reading; the first also changes its
    state then."""
    model = small_vit(pos_embed=kind, pos_embed_use_grid_sample=flagged)
    computed = []

    class Counted(nn.Module):
        def forward(self, table):
            computed.append(self)
            return table * 2

    parts = ["pos_embed"] if kind == "learned" else ["pos_embed_y", "pos_embed_x"]
    for name in parts:
        parametrize.register_parametrization(model.embeds, name, Counted())
    for run in (lambda: embed(model), lambda: model.embeds(torch.zeros(1, 1, 24, 28))):
        computed.clear()
        with enable(strict=True):
            run()
            assert ("pos_embed", "stock") not in status().calls
        assert len({*computed}) == len(computed) == len(parts)


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
def test_coordinates_are_asked_as_x_is():
    model = small_vit()
    coord = TwoTensor(COORD, COORD.clone())
    enable()
    with torch.no_grad():
        model.embeds._apply_learned_naflex_pos_embed(torch.zeros(2, 6, 32), coord)
    assert status().fallbacks == {"a tensor of the class TwoTensor": 1}


def pinv(self, *size):
    """A method of somebody's in place of timm's."""
    return -3 * PINV(self, *size)


PINV = PatchEmbedResamplerFixedOrigSize._get_or_create_pinv_matrix


def of_a_class(module, name, method, _):
    module.__class__ = type("Mine", (type(module),), {name: method})


def of_an_instance(module, name, method, _):
    setattr(module, name, MethodType(method, module))


def of_timms_class(module, name, method, patch):
    patch.setattr(type(module), name, method)


def of_timms_class_by_a_proxy(module, name, method, patch):
    call = lambda timms, self, given, options: method(self, *given, **options)
    patch.setattr(type(module), name, wrapt.FunctionWrapper(vars(type(module))[name], call))


PUT = [of_a_class, of_an_instance, of_timms_class, of_timms_class_by_a_proxy]


# TorchDynamo fails on such proxies.
@pytest.mark.parametrize(
    ("put", "compiled"), [*product(PUT, [False]), *starmap(slow, product(PUT[:3], [True]))]
)
@pytest.mark.parametrize("before", [False, True])
def test_a_method_that_ours_bypasses_is_somebody_elses(put, before, compiled, monkeypatch):
    """Then timm's own code runs, which calls it, and is counted."""
    module = PatchEmbedResamplerFixedOrigSize((6, 6))
    kernel = torch.randn(4, 2, 6, 6)
    call = torch.compile(module, backend="eager") if compiled else module
    plain = module(kernel, [9, 9])
    override = lambda: put(module, "_get_or_create_pinv_matrix", pinv, monkeypatch)
    if before:
        override()
    enable()
    if not before:
        torch.testing.assert_close(call(kernel, [9, 9]), plain, atol=1e-5, rtol=1e-5)
        override()
    reason = f"{type(module).__name__}, whose _get_or_create_pinv_matrix is not timm's own,"
    with pytest.warns(UserWarning, match=f"{reason} stays with timm's own code") as said:
        for _ in range(2):
            got = call(kernel, [9, 9])
    assert len(said) == 1
    torch.testing.assert_close(got, -3 * plain, atol=1e-5, rtol=1e-5)
    assert status().fallbacks.keys() == {reason}
    with enable(strict=True), pytest.raises(RuntimeError, match=f"{reason} needs timm's own code"):
        module(kernel, [9, 9])


ROTARY_METHODS = (
    "get_embed get_batch_embeds _build_embed_cat _build_embed _create_embed "
    "_get_pos_embed_from_coords"
)


HAS_ROPE = hasattr(naflexvit.NaFlexVitCfg, "rope_type")


@pytest.mark.skipif(not HAS_ROPE, reason="this timm's NaFlexVit has no rotary embeddings")
def test_wrong_coordinates_of_rotary_embeddings_are_an_error():
    model = small_vit(rope_type="axial", pos_embed="none")
    enable()
    with pytest.raises(ValueError, match="sample 0 holds a negative"):
        model._generate_rope_naflex(torch.zeros(2, 6, 32), COORD - 1)
    with pytest.raises(ValueError, match=r"for each token, shape \(2, 5, 2\)"):
        model._generate_rope_naflex(torch.zeros(2, 5, 32), COORD)


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("kind", ["axial", "mixed", "dinov3", "mrope"])
def test_each_method_of_rotary_modules_that_timm_calls_may_be_somebody_elses(kind):
    try:
        model = small_vit(rope_type=kind, pos_embed="none")
    except (TypeError, ValueError, AssertionError):
        pytest.skip("this timm has no such rotary embeddings")
    rotate = lambda: model._generate_rope_naflex(torch.zeros(2, 6, 32), COORD)
    enable(), rotate()
    if status().fallbacks:
        pytest.skip("this timm's own code computes them")
    for name in ROTARY_METHODS.split():
        method = getattr(model.rope, name, None)
        if method is None:
            continue
        setattr(model.rope, name, lambda *given, method=method, **named: method(*given, **named))
        enable(), rotate()
        assert status().calls == {("rope", "stock"): 1}
        delattr(model.rope, name)
        enable(), rotate()
        assert status().calls == {("rope", "batched"): 1}
