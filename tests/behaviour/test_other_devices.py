"""On a device that is neither a CPU nor CUDA: no float64, no ``embedding_bag``, and timm's result.

The device is a pretended one (tests/support/metal.py), which refuses what Metal refuses.
"""

import pytest
import torch
from timm.layers.patch_embed import resample_patch_embed

from tests.support.metal import Metal, OnMetal
from tests.support.oracles import row_major
from timm_naflex_fast import functional as fast
from timm_naflex_fast import tracing
from timm_naflex_fast.names import STRATEGY_NAMES

pytestmark = pytest.mark.usefixtures("clean")
DEVICE = "mps:0"
SIZES = [(3, 4), (9, 2), (6, 5), (1, 7), (8, 1)]


@pytest.fixture(autouse=True)
def plain_class(monkeypatch):
    """The package leaves subclasses of Tensor to PyTorch; here they stand for plain tensors."""
    monkeypatch.setattr(tracing, "OWN_MEMORY", (*tracing.OWN_MEMORY, OnMetal))


def to_device(batch):
    return {name: value.to(DEVICE) for name, value in batch.items()}


@pytest.fixture
def both(monkeypatch):
    """A function of a mover of tensors runs on the CPU and on the device: both results."""

    def run(function):
        want = function(lambda tensor: tensor)
        with Metal(monkeypatch):
            got = function(lambda tensor: tensor.to(DEVICE))
            got = [tensor.held if isinstance(tensor, OnMetal) else tensor for tensor in got]
            ran = dict(Metal.ran)
        assert ran.get("torch.float32") and "torch.float64" not in ran
        return want, got, ran

    return run


def close(got, want, forward=2e-6, gradients=1e-5):
    """The first is an output, the others are gradients."""
    largest = max(1.0, want[0].abs().max().item())
    assert (got[0] - want[0]).abs().max() <= forward * largest
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert (ours - theirs).abs().max() <= gradients * theirs.abs().max().clamp(min=1e-3)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LEARNED = [
    dict(mode="bilinear"),
    dict(mode="bicubic"),
    dict(mode="bicubic", ar_preserving=True),
    dict(mode="bilinear", antialias=False, align_corners=True),
]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_learned_tables_and_their_gradients(both, strategy, options):
    def add(to):
        table = to(random(6, 5, 8)).requires_grad_()
        x = to(random(5, 31, 8, seed=1)).requires_grad_()
        out = fast.add_pos_embed_(
            x * 1, table, to(row_major(SIZES, 31)), strategy=strategy, **options
        )
        weight = to(random(5, 31, 8, seed=2))
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [table, x])]

    want, got, ran = both(add)

    close(got, want)
    # Only F.interpolate, which needs sizes, reads the grids on the host.
    assert ("read on the host" in ran) == (strategy == "interpolate_cached")


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_factorized_tables_and_their_gradients(both, strategy):
    def add(to):
        rows = to(random(6, 8)).requires_grad_()
        columns = to(random(5, 8, seed=3)).requires_grad_()
        out = fast.add_factorized_pos_embed_(
            to(random(5, 31, 8, seed=1)), rows, columns, to(row_major(SIZES, 31)), strategy=strategy
        )
        weight = to(random(5, 31, 8, seed=2))
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [rows, columns])]

    want, got, _ = both(add)

    close(got, want, forward=4e-6)


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("options", [{}, dict(length=40, padding="first"), dict(merge=2)], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_embeddings_by_sizes(both, strategy, options, as_tensor):
    def resample(to):
        table = to(random(6, 5, 8)).requires_grad_()
        sizes = [(4, 6), (2, 2), (8, 4)]
        sizes = to(torch.tensor(sizes)) if as_tensor else sizes
        out = fast.resample_pos_embeds(table, sizes, mode="bilinear", strategy=strategy, **options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), table)]

    want, got, _ = both(resample)

    close(got, want)


@pytest.mark.parametrize("size", [(9, 14), (20, 20), (32, 12)])
def test_patch_kernels_and_their_gradients(both, size):
    def resample(to):
        weight = to(random(12, 3, 16, 16)).requires_grad_()
        out = fast.resample_patch_kernel(weight, size)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), weight)]

    want, got, _ = both(resample)

    close(got, want, forward=1e-5)
    timms = resample_patch_embed(random(12, 3, 16, 16), list(size))
    assert (got[0] - timms).abs().max() <= 1e-5 * timms.abs().max()
