"""Patch kernels resampled by separable pseudo-inverses equal timm's own, and are as near to
float64."""

import inspect
import itertools
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, reject
from hypothesis import strategies as st
from timm.layers.patch_embed import PatchEmbedInterpolator, resample_patch_embed

from tests.support.checks import Watch, during, written
from tests.support.oracles import OLD_TORCH, PRISTINE, finished_tables, relative
from tests.support.running import running
from timm_naflex_fast.functional import resample_patch_kernel, resize_matrix
from timm_naflex_fast.patch_embed.kernels import product_dtype

ORIGINAL = PRISTINE[PatchEmbedInterpolator]
LAYOUTS = (
    (True, False)
    if "channels_last" in inspect.signature(PatchEmbedInterpolator).parameters
    else (True,)
)
sizes, modes = st.tuples(*2 * [st.integers(3, 24)]), st.sampled_from(["bilinear", "bicubic"])


def interpolator(base, channels_last=True, mode="bicubic", antialias=True, in_chans=3):
    extra = {} if channels_last else dict(channels_last=False)
    return PatchEmbedInterpolator(
        base, in_chans, embed_dim=5, interpolation=mode, antialias=antialias, **extra
    )


def truth(weight, size, mode, antialias):
    """k' = pinv(A_h)^T k pinv(A_w) in float64."""
    lengths = zip(size, weight.shape[2:])
    left, right = (
        torch.linalg.pinv(resize_matrix(*n, mode, antialias, dtype=torch.float64)) for n in lengths
    )
    return left.t() @ weight.double() @ right


@example((8, 8), (5, 1), "bicubic", True)  # for a width of 1 timm's own matrix is wrong
@example((37, 32), (16, 41), "bicubic", True)  # long sides
@example((4, 46), (45, 5), "bicubic", True)
@given(sizes, sizes, modes, st.booleans())
def test_equals_timm_and_is_no_farther_from_float64(old, new, mode, antialias):
    weight = torch.randn(8, 3, *old, requires_grad=True)
    exact = truth(weight, new, mode, antialias)
    got = resample_patch_kernel(weight, new, mode=mode, antialias=antialias)
    upstream = torch.randn_like(got)
    gradients = [torch.autograd.grad((out * upstream).sum(), weight)[0] for out in (got, exact)]
    assert (
        got.shape == exact.shape and relative(got, exact) <= 1e-6 and relative(*gradients) <= 1e-5
    )
    try:
        theirs = resample_patch_embed(weight, list(new), interpolation=mode, antialias=antialias)
    except (
        torch.linalg.LinAlgError
    ):  # its SVD does not always converge: (23, 23) -> (24, 23), bilinear
        reject()
    assert relative(got, exact) <= relative(theirs, exact) + 1e-6
    if all(
        n >= n0 / 2 for n, n0 in zip(new, old)
    ):  # below, timm's pseudo-inverse cuts singular values
        assert relative(got, theirs) <= 1e-5


def test_linear_layouts_equal_timm_and_a_kept_kernel_is_used_for_its_own_settings_alone():
    """One weight in every layout, twice; and trained, which is not kept."""
    weight, bias = torch.randn(5, 48), torch.randn(5)
    trained = torch.nn.Parameter(weight.clone())
    bases = {
        ((4, 4), 3, True),
        ((8, 6), 1, True),
        ((4, 4), 3, LAYOUTS[-1]),
        ((8, 6), 1, LAYOUTS[-1]),
    }
    cases = itertools.product(bases, ["bicubic", "bilinear"], [True, False], [(6, 5), (12, 8)])
    for (base, in_chans, channels_last), mode, antialias, size in [*cases] * 2:
        module = interpolator(base, channels_last, mode, antialias, in_chans)
        resampled = ORIGINAL["resample_linear_weight"](module, trained, size)
        patches = torch.randn(2, 7, size[0] * size[1] * in_chans)
        image = patches.unflatten(2, (*size, in_chans) if channels_last else (in_chans, *size))
        want = F.linear(patches, resampled, bias)
        with running(component="patch_embed"):
            assert relative(module.resample_linear_weight(weight, size), resampled) <= 1e-5
            got, kept = (module(image, each, bias, patch_size=size) for each in (trained, weight))
        assert relative(got, want) <= 1e-5 and relative(kept, want) <= 1e-5
        assert (
            relative(*(torch.autograd.grad(out.square().sum(), trained)[0] for out in (got, want)))
            <= 1e-5
        )
    assert finished_tables() == 8 * (1 + len(LAYOUTS))  # with one channel layouts are the same


def test_a_weight_of_other_channels_raises_as_timms_does_and_one_without_outputs_gives_none():
    module, patches = interpolator((4, 4)), torch.randn(2, 7, 6, 5, 4)
    with (
        running(component="patch_embed"),
        pytest.raises(RuntimeError, match="is invalid for input of size"),
    ):
        module(patches, torch.randn(6, 64), patch_size=(6, 5))
    with running(component="patch_embed"):
        assert module(patches[..., :3], torch.randn(0, 48), patch_size=(6, 5)).shape == (2, 7, 0)


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_float32_inside_and_float64_where_pytorch_may_round_it(dtype, precision):
    """Forward and backward, from matrices that were cached in inference mode."""
    weight = torch.randn(5, 3, 8, 8, dtype=dtype, requires_grad=True)
    with torch.inference_mode():
        want = resample_patch_kernel(
            weight if dtype is torch.float64 else weight.float(), (6, 7)
        ).to(dtype)

    def see(func, args):  # in sight of a mode the factors of a kernel, 8 x 8, are computed too
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and args[0].numel() > 64:
            dtypes.update(tensor.dtype for tensor in args)

    for autocast in (False, True):
        dtypes = set()  # in which kernels are multiplied
        lowering = during(torch.set_float32_matmul_precision, precision, after="highest")
        with lowering, Watch(see), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = resample_patch_kernel(weight, (6, 7))
            got.sum().backward()
        wide = autocast or precision == "medium" or dtype is torch.float64
        assert dtypes == {torch.float64 if wide else torch.float32}
        assert (
            got.dtype == dtype
            and relative(got, want) <= max(1e-6, torch.finfo(dtype).eps / 2) * wide
        )


@pytest.mark.parametrize(("in_chans", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("how", ["compile", "make_fx"] + ["export"] * (not OLD_TORCH))
def test_a_graph_of_fixed_sizes_holds_the_factors_as_constants(how, in_chans, dtype):
    """But a compiled one, which computes them."""
    module, sizes = interpolator((8, 6), in_chans=in_chans), ((6, 9), (12, 8), (8, 4))
    module.forward = lambda weight: [module.resample_linear_weight(weight, size) for size in sizes]
    weights = torch.randn(2, 5, in_chans * 48).to(dtype)
    with running(component="patch_embed"), torch.device("meta"):  # a default device changes nothing
        program, wants = written(how, module, weights[0]), module(weights[1])
        for got, want in zip(program(weights[1]), wants, strict=True):
            assert (
                relative(got, want) <= max(1e-6, torch.finfo(dtype).eps / 4) and got.dtype is dtype
            )
    assert how == "compile" or "linalg" not in str(program.graph)


def test_where_pytorch_refuses_to_tell_the_precision_may_be_lowered(monkeypatch):
    monkeypatch.setattr(
        torch, "get_float32_matmul_precision", Mock(side_effect=RuntimeError("mixed flags"))
    )
    assert product_dtype(torch.ones(1)) is torch.float64


@pytest.mark.parametrize("new", [(3, 5), (6, 4), (4, 7)])
def test_differentiable_any_number_of_times_in_every_mode(new):
    resampled = lambda weight: resample_patch_kernel(weight, new)
    weight = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    for function in (
        resampled,
        lambda weight: resampled(weight).pow(3),
    ):  # forward mode, and over the gradient
        assert torch.autograd.gradcheck(
            function, weight, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(function, weight, check_fwd_over_rev=True)


def test_weights_that_are_not_contiguous():
    part = torch.randn(6, 5, 9, 10)[:, :3, :8, 2:]
    channels_last, expanded = (
        part.to(memory_format=torch.channels_last),
        part[:, :1].expand(-1, 3, -1, -1),
    )
    for weight in (part, part.contiguous().transpose(2, 3), channels_last, expanded):
        assert resample_patch_kernel(weight, (8, 8)) is weight
        assert resample_patch_kernel(weight.bfloat16(), (5, 60)).dtype is torch.bfloat16
        for new in ((5, 6), (8, 6), (6, 8)):
            want = resample_patch_kernel(
                weight.contiguous(), new, mode="bicubic", antialias=True
            )  # the defaults
            assert torch.equal(resample_patch_kernel(weight, new), want)
