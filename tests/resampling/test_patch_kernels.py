"""Patch kernels resampled by matrix product, against timm's own interpolator on the installed release."""

import inspect

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import PRISTINE, relative, row_major, small_vit
from timm.layers.patch_embed import PatchEmbedInterpolator, resample_patch_embed

import timm_naflex_fast
from timm_naflex_fast.functional import resample_patch_kernel

ORIGINAL = PRISTINE[PatchEmbedInterpolator]
LAYOUTS = (True, False) if "channels_last" in inspect.signature(PatchEmbedInterpolator).parameters else (True,)
side = st.integers(3, 12)


def interpolator(base, channels_last=True, mode="bicubic", antialias=True):
    extra = {} if channels_last else dict(channels_last=False)
    return PatchEmbedInterpolator(base, in_chans=3, embed_dim=5, interpolation=mode, antialias=antialias, **extra)


def well_conditioned(base, size):
    """timm's pseudo-inverse cuts singular values where a patch shrinks far; equality is asked where it does not."""
    return all(n >= n0 / 2 for n, n0 in zip(size, base))


@given(st.tuples(side, side), st.tuples(side, side), st.sampled_from(["bilinear", "bicubic"]), st.booleans())
def test_equals_timm(base, size, mode, antialias):
    assume(well_conditioned(base, size))
    weight = torch.randn(5, 3, *base, requires_grad=True)
    want = resample_patch_embed(weight, list(size), interpolation=mode, antialias=antialias)
    got = resample_patch_kernel(weight, size, mode=mode, antialias=antialias)
    assert got.shape == (5, 3, *size) and relative(got, want) <= 1e-5
    upstream = torch.randn_like(got)
    want_grad, got_grad = (torch.autograd.grad((out * upstream).sum(), weight)[0] for out in (want, got))
    assert relative(got_grad, want_grad) <= 1e-5


@pytest.mark.ran("patch_embed=matmul")
@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("size", [(6, 9), (12, 8), (8, 6)])
def test_linear_layouts_equal_timm(channels_last, size):
    module, weight = interpolator((8, 6), channels_last), torch.randn(5, 3 * 48)
    want = ORIGINAL["resample_linear_weight"](module, weight, size)
    with timm_naflex_fast.enable():
        got = module.resample_linear_weight(weight, size)
    assert got.shape == want.shape and relative(got, want) <= 1e-5


@pytest.mark.ran("patch_embed=matmul")
def test_conv_weights_equal_timm():
    module, weight = interpolator((8, 8)), torch.randn(5, 3, 8, 8)
    want = ORIGINAL["resample_conv_weight"](module, weight, (6, 12))
    with timm_naflex_fast.enable():
        assert relative(module.resample_conv_weight(weight, (6, 12)), want) <= 1e-5
        assert module.resample_conv_weight(weight, (8, 8)) is weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float32_inside_whatever_the_dtype_and_autocast(dtype):
    weight = torch.randn(5, 3, 8, 8).to(dtype)
    want = resample_patch_kernel(weight.float(), (6, 7)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = resample_patch_kernel(weight, (6, 7))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        lowered = resample_patch_kernel(weight, (6, 7))
    finally:
        torch.set_float32_matmul_precision(before)
    assert mixed.dtype == lowered.dtype == dtype
    assert torch.equal(mixed, want)
    assert relative(lowered, want) <= max(1e-6, torch.finfo(dtype).eps / 2)


def test_inference_mode_then_training():
    weight = torch.randn(5, 3, 7, 7, requires_grad=True)
    with torch.inference_mode():
        resample_patch_kernel(weight, (5, 11))
    resample_patch_kernel(weight, (5, 11)).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("bad", [dict(size=(0, 3)), dict(size=(3,)), dict(size=(3, 3), mode="nearest")])
def test_bad_input(bad):
    with pytest.raises(ValueError):
        resample_patch_kernel(torch.zeros(5, 3, 4, 4), **bad)
    with pytest.raises(ValueError, match=r"\(O, I, H0, W0\)"):
        resample_patch_kernel(torch.zeros(3, 4, 4), (2, 2))


@pytest.mark.parametrize(
    "size",
    [pytest.param((4, 4), marks=pytest.mark.ran("matmul"))]  # the kernel's own size: nothing to resample
    + [pytest.param(size, marks=pytest.mark.ran("patch_embed=matmul")) for size in ((3, 6), (6, 3))],
)
def test_a_model_on_another_patch_size(size):
    model = small_vit(enable_patch_interpolator=True)
    patches, coord = torch.randn(2, 12, *size, 1), row_major([(3, 4), (2, 6)])
    outputs = []
    for mode in ("stock", "matmul"):
        with timm_naflex_fast.enable(mode):
            model.zero_grad()
            out = model.embeds(patches, patch_coord=coord)
            out = out[0] if isinstance(out, tuple) else out
            out.square().sum().backward()
        outputs.append((out, model.embeds.proj.weight.grad.clone()))
    assert relative(outputs[1][0], outputs[0][0]) <= 1e-5 and relative(outputs[1][1], outputs[0][1]) <= 1e-5
