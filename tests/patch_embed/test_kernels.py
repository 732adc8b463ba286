"""Patch kernels resampled by matrix product, against timm's own interpolator on the installed release."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import PRISTINE, relative, row_major, small_vit
from timm.layers import patch_embed
from timm.layers.patch_embed import PatchEmbedInterpolator, resample_patch_embed
from torch.utils._python_dispatch import TorchDispatchMode

import timm_naflex_fast
from timm_naflex_fast.functional import resample_patch_kernel

ORIGINAL = PRISTINE[PatchEmbedInterpolator]
LAYOUTS = (True, False) if "channels_last" in inspect.signature(PatchEmbedInterpolator).parameters else (True,)
side = st.integers(3, 12)


def interpolator(base, channels_last=True, mode="bicubic", antialias=True, in_chans=3):
    extra = {} if channels_last else dict(channels_last=False)
    return PatchEmbedInterpolator(base, in_chans, embed_dim=5, interpolation=mode, antialias=antialias, **extra)


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
@pytest.mark.parametrize("in_chans", [1, 3, 4, 5, 9])  # more than four are transposed first
@pytest.mark.parametrize("how", [("bicubic", True), ("bilinear", False)])
def test_linear_layouts_equal_timm(channels_last, in_chans, how):
    module, weight = interpolator((8, 6), channels_last, *how, in_chans), torch.randn(5, in_chans * 48)
    for size in ((6, 9), (12, 8), (8, 6)):
        want = ORIGINAL["resample_linear_weight"](module, weight, size)
        patches, bias = torch.randn(2, 7, size[0] * size[1] * in_chans), torch.randn(5)
        shape = (*size, in_chans) if channels_last else (in_chans, *size)
        with timm_naflex_fast.enable():
            assert relative(module.resample_linear_weight(weight, size), want) <= 1e-5
            if size != (8, 6):
                for frozen in (weight, torch.nn.Parameter(weight)):  # kept, and not kept
                    got = module(patches.unflatten(2, shape), frozen, bias, patch_size=size)
                    assert relative(got, F.linear(patches, want, bias)) <= 1e-5


@pytest.mark.usefixtures("clean")
@pytest.mark.ran("patch_embed=matmul")
def test_a_kept_kernel_is_used_for_its_own_layout_and_settings_alone():
    weight = torch.randn(5, 2 * 16)
    timm_naflex_fast.enable()
    for again in range(2):
        for how in (("bicubic", True), ("bilinear", True), ("bicubic", False)):
            for base, in_chans, channels_last in {((4, 4), 2, True), ((8, 4), 1, True), ((4, 4), 2, LAYOUTS[-1])}:
                module = interpolator(base, channels_last, *how, in_chans)
                want = ORIGINAL["resample_linear_weight"](module, weight, (6, 5))
                patches = torch.randn(1, 3, *((6, 5, in_chans) if channels_last else (in_chans, 6, 5)))
                got = module(patches, weight, patch_size=(6, 5))
                assert relative(got, F.linear(patches.flatten(2), want)) <= 1e-5, (again, how, base)


@pytest.mark.ran("patch_embed=matmul")
@pytest.mark.parametrize("how", [("bicubic", True), ("bilinear", False)])
def test_conv_weights_equal_timm(how):
    module, weight = interpolator((8, 8), True, *how), torch.randn(5, 3, 8, 8)
    want = ORIGINAL["resample_conv_weight"](module, weight, (6, 12))
    images, bias = torch.randn(2, 3, 12, 24), torch.randn(5)
    with timm_naflex_fast.enable():
        assert relative(module.resample_conv_weight(weight, (6, 12)), want) <= 1e-5
        assert module.resample_conv_weight(weight, (8, 8)) is weight
        projected = module(images, weight, bias, patch_size=(6, 12), is_linear=False)
        function = patch_embed.resample_patch_embed(weight, [6, 12], *how)
    assert relative(projected, F.conv2d(images, want, bias, stride=(6, 12))) <= 1e-5
    assert relative(function, resample_patch_embed(weight, [6, 12], *how)) <= 1e-5


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


class Products(TorchDispatchMode):
    """The dtypes in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.dtypes |= {tensor.dtype for tensor in args}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_the_dtype_of_the_products(dtype, precision):
    """float32, and float64 where PyTorch may round float32 factors; forward and backward."""
    weight = torch.randn(5, 3, 8, 8, dtype=dtype, requires_grad=True)
    resample_patch_kernel(weight, (6, 7)).sum().backward()  # keeps the pseudo-inverses
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with Products() as seen:
            resample_patch_kernel(weight, (6, 7)).sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    lowered = precision == "medium" or dtype is torch.float64
    assert seen.dtypes == {torch.float64 if lowered else torch.float32}


@pytest.mark.ran("patch_embed=matmul")
@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_form_that_dynamo_sees_is_the_same(dtype, in_chans, monkeypatch):
    module, weight = interpolator((8, 6), in_chans=in_chans), torch.randn(5, in_chans * 48).to(dtype)
    with timm_naflex_fast.enable():
        for size in ((6, 9), (12, 8), (8, 4)):
            want = module.resample_linear_weight(weight, size)
            with monkeypatch.context() as context:
                context.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
                got = module.resample_linear_weight(weight, size)
            assert relative(got, want) <= max(1e-6, torch.finfo(dtype).eps / 4) and got.dtype is dtype
