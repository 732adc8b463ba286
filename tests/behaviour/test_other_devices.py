"""On a device that is neither a CPU nor CUDA: no float64, no ``embedding_bag``, and timm's result.

The device is a pretended one (tests/support/metal.py), which refuses what Metal refuses.
"""

import pytest
import torch
from timm.layers.patch_embed import resample_patch_embed

from tests.support.metal import Metal, OnMetal
from tests.support.oracles import row_major, small_vit
from tests.support.rotary import CLASSES, build
from tests.support.running import running
from timm_naflex_fast import enable, status, tracing
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.rope.batched import batched_rope
from timm_naflex_fast.rope.modules import read_rope

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


def on(to, **kwargs):
    """The embeddings of a small NaFlexVit whose tables lie where ``to`` moves them."""
    embeds = small_vit(depth=0, **kwargs).embeds
    for name, table in embeds._parameters.items():
        if name.startswith("pos_embed") and table is not None:
            embeds._parameters[name] = torch.nn.Parameter(to(table.detach()))
    return embeds


@pytest.mark.parametrize("method", ["naflex_pos_embed", "pos_embed"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("mode", STRATEGY_NAMES)
def test_timms_embeddings_are_trained_three_steps(both, mode, kind, method):
    if mode == "grid_sample" and method == "pos_embed":
        pytest.skip("plain images have no such flag in timm")
    grid = (3, 7)

    def train(to):
        embeds = on(to, pos_embed=kind)
        parameters = [table for name, table in embeds.named_parameters() if "pos_embed" in name]
        where = to(row_major(SIZES, 31)) if method == "naflex_pos_embed" else grid
        count = 31 if method == "naflex_pos_embed" else 21
        x = to(random(5, count, 32, seed=1))
        outs = []
        with running(mode):
            for _ in range(3):
                out = x * 1
                getattr(embeds, f"_apply_{kind}_{method}")(out, where)
                outs.append(out.detach())
                gradients = torch.autograd.grad(out.square().mean(), parameters)
                with torch.no_grad():
                    for table, gradient in zip(parameters, gradients, strict=True):
                        table -= 10 * gradient
        return [torch.stack([getattr(out, "held", out) for out in outs])]

    want, got, _ = both(train)

    assert not torch.equal(want[0][0], want[0][2])  # the steps change the tables
    close(got, want, forward=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_rotary_embeddings(both, kind):
    def make(to):
        torch.manual_seed(0)
        module = build(kind).train()
        for name, value in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(to(value.detach()))
        for name, value in module._buffers.items():
            module._buffers[name] = value if value is None else to(value)
        found = batched_rope(read_rope(module), to(row_major(SIZES, 31)), torch.float32)
        tables = list(found) if kind == "mixed" else [found]
        return [table.detach() for table in tables]

    want, got, _ = both(make)

    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() <= 2e-6


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
def test_where_an_operator_is_missing_timms_own_code_runs_and_status_says_why(monkeypatch):
    def add(to):
        embeds = on(to)
        x = to(torch.zeros(5, 31, 32))
        embeds._apply_learned_naflex_pos_embed(x, to(row_major(SIZES, 31)))
        return x.detach()

    want = add(lambda tensor: tensor)

    enable()
    with Metal(monkeypatch, lacking=[torch.ops.aten.mm]):
        got = add(lambda tensor: tensor.to(DEVICE))

    assert torch.equal(got.held, want)
    assert dict(status().fallbacks) == {"a device (mps) without aten.mm": 1}
    assert status().calls == {("pos_embed", "stock"): 1}


def test_transformers_siglip2(both):
    pytest.importorskip("transformers")
    from transformers import Siglip2VisionConfig
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    def embed(to):
        torch.manual_seed(0)
        config = Siglip2VisionConfig(hidden_size=16, num_attention_heads=2, num_patches=36)
        embeddings = Siglip2VisionEmbeddings(config)
        for module in (embeddings.patch_embedding, embeddings.position_embedding):
            for name, value in module._parameters.items():
                module._parameters[name] = torch.nn.Parameter(to(value.detach()))
        patches = to(random(5, 31, 768))
        with running("matmul", library="transformers"):
            out = embeddings(patches, torch.tensor(SIZES))
        weight = embeddings.position_embedding.weight
        return [out.detach(), *torch.autograd.grad(out.square().sum(), weight)]

    want, got, _ = both(embed)

    close(got, want)
