"""Patch kernels resampled by separable pseudo-inverses equal timm's own.

And they are as near to float64.
"""

import inspect
import itertools
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from timm.layers.patch_embed import PatchEmbedInterpolator, resample_patch_embed

from tests.support.checks import Watch, during, written
from tests.support.oracles import OLD_TORCH, PRISTINE, finished_tables, relative
from tests.support.running import running
from timm_naflex_fast.functional import resample_patch_kernel, resize_matrix

ORIGINAL = PRISTINE[PatchEmbedInterpolator]
HAS_LAYOUTS = "channels_last" in inspect.signature(PatchEmbedInterpolator).parameters
LAYOUTS = (True, False) if HAS_LAYOUTS else (True,)
MODES = "bicubic", "bilinear"
MATMULS = torch.ops.aten.mm.default, torch.ops.aten.bmm.default
HOW_WRITTEN = ["compile", "make_fx"] if OLD_TORCH else ["compile", "make_fx", "export"]
side = st.integers(3, 24)
sizes = st.tuples(side, side)


def interpolator(base, in_chans=3, channels_last=True, mode="bicubic", antialias=True):
    layout = {} if channels_last else {"channels_last": False}
    how = dict(interpolation=mode, antialias=antialias)
    return PatchEmbedInterpolator(base, in_chans, embed_dim=5, **how, **layout)


def truth(weight, size, mode, antialias):
    """k' = pinv(A_h)^T k pinv(A_w) in float64."""

    def inverse(n, n0):
        return torch.linalg.pinv(resize_matrix(n, n0, mode, antialias, dtype=torch.float64))

    h, w = size
    h0, w0 = weight.shape[2:]
    return inverse(h, h0).t() @ weight.double() @ inverse(w, w0)


@example((8, 8), (5, 1), "bicubic", True)  # for a width of 1 timm's own matrix is wrong
@example((37, 32), (16, 41), "bicubic", True)  # long sides
@example((4, 46), (45, 5), "bicubic", True)
@given(sizes, sizes, st.sampled_from(MODES), st.booleans())
def test_equals_timm_and_is_no_farther_from_float64(old, new, mode, antialias):
    weight = torch.randn(3, 8, *old).transpose(0, 1).requires_grad_()
    exact = truth(weight, new, mode, antialias)
    upstream = torch.randn_like(exact)

    got = resample_patch_kernel(weight, new, mode=mode, antialias=antialias)

    assert resample_patch_kernel(weight, old) is weight
    assert got.shape == exact.shape
    assert relative(got, exact) <= 1e-6
    (gradient,) = torch.autograd.grad((got * upstream).sum(), weight)
    (exact_gradient,) = torch.autograd.grad((exact * upstream).sum(), weight)
    assert relative(gradient, exact_gradient) <= 1e-5
    how = dict(interpolation=mode, antialias=antialias)
    if (mode, antialias) == ("bicubic", True):
        how = {}  # timm's own settings are these, and ours
        assert torch.equal(resample_patch_kernel(weight, new), got)
    try:
        theirs = resample_patch_embed(weight, list(new), **how)
    except torch.linalg.LinAlgError:
        reject()  # timm's SVD does not always converge: (23, 23) -> (24, 23), bilinear
    assert relative(got, exact) <= relative(theirs, exact) + 1e-6
    # For less than half a side timm's pseudo-inverse cuts singular values.
    if 2 * new[0] >= old[0] and 2 * new[1] >= old[1]:
        assert relative(got, theirs) <= 1e-5


def test_linear_layouts_equal_timm_and_a_kept_kernel_is_used_for_its_own_settings_alone():
    """One weight in every layout, three times; and trained, which is not kept."""
    weight = torch.randn(5, 48)
    trained = torch.nn.Parameter(weight.clone())
    bases = [((4, 4), 3), ((8, 6), 1)]
    cases = [*itertools.product(bases, LAYOUTS, MODES, [True, False], [(6, 5), (12, 8)])]

    for base, channels_last, mode, antialias, size in cases * 3:
        module = interpolator(*base, channels_last, mode, antialias)
        want = ORIGINAL["resample_linear_weight"](module, trained, size)
        (want_grad,) = torch.autograd.grad(want.square().sum(), trained)

        with running(component="patch_embed"):
            kept = module.resample_linear_weight(weight, size)
            got = module.resample_linear_weight(trained, size)

        assert relative(kept, want) <= 1e-5
        assert relative(got, want) <= 1e-5
        (grad,) = torch.autograd.grad(got.square().sum(), trained)
        assert relative(grad, want_grad) <= 1e-5
    # Two bases, two modes, antialias on and off, two sizes.
    assert finished_tables() == 16 * len(LAYOUTS)


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_float32_inside_and_float64_where_pytorch_may_round_it(dtype, autocast, precision):
    """Forward and backward, from matrices that were cached in inference mode."""
    weight = torch.randn(5, 3, 8, 8, dtype=dtype, requires_grad=True)
    precise = weight if dtype is torch.float64 else weight.float()
    with torch.inference_mode():
        want = resample_patch_kernel(precise, (6, 7)).to(dtype)
    dtypes = set()  # in which kernels are multiplied

    def see(func, args):  # in sight of a mode the factors, 8 x 8, are computed too
        if func in MATMULS and args[0].numel() > 64:
            dtypes.update(tensor.dtype for tensor in args)

    lowering = during(torch.set_float32_matmul_precision, precision, after="highest")
    with lowering, Watch(see), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = resample_patch_kernel(weight, (6, 7))
        got.sum().backward()

    lowered = autocast or precision == "medium"
    wide = lowered or dtype is torch.float64
    assert dtypes == {torch.float64 if wide else torch.float32}
    assert got.dtype == dtype
    # As it was before, bit for bit, but where other factors were multiplied.
    rounding = max(1e-6, torch.finfo(dtype).eps / 2) if wide else 0
    assert relative(got, want) <= rounding


@pytest.mark.parametrize(
    ("how", "in_chans", "dtype"),
    [("make_fx", 1, torch.float32), *((how, 3, torch.bfloat16) for how in HOW_WRITTEN)],
)
def test_a_graph_of_fixed_sizes_holds_the_factors_as_constants(how, in_chans, dtype):
    """But a compiled one, which computes them."""
    module = interpolator((8, 6), in_chans)
    patch_sizes = (6, 9), (12, 4)
    module.forward = lambda weight: [module.resample_linear_weight(weight, s) for s in patch_sizes]
    weight, other = torch.randn(2, 5, in_chans * 48).to(dtype)

    with running(component="patch_embed"), torch.device("meta"):  # a default device changes nothing
        program = written(how, module, weight)
        gots = program(other)
        wants = module(other)

    for got, want in zip(gots, wants, strict=True):
        assert got.dtype is dtype
        assert relative(got, want) <= max(1e-6, torch.finfo(dtype).eps / 4)
    assert how == "compile" or "linalg" not in str(program.graph)


def test_where_pytorch_refuses_to_tell_the_precision_may_be_lowered(monkeypatch):
    refuses = Mock(side_effect=RuntimeError("mixed flags"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    weight = torch.randn(2, 3, 8, 8)
    got = resample_patch_kernel(weight, (5, 9))
    assert refuses.called
    assert relative(got, truth(weight, (5, 9), "bicubic", True)) <= 1e-7


@pytest.mark.parametrize(("new", "power"), [((3, 5), 1), ((6, 7), 3)])  # linear, and not
def test_differentiable_any_number_of_times_in_every_mode(new, power):
    weight = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def f(weight):
        return resample_patch_kernel(weight, new).pow(power)

    assert torch.autograd.gradcheck(f, weight, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, weight, check_fwd_over_rev=True)
