"""On a GPU: timm's result, reproducible gradients, TF32 flags without effect, CUDA graphs.

Never run on a GPU. ``test_second_device.py`` pretends to have one.
"""

from functools import partial

import pytest
import torch

from tests.support.checks import during
from tests.support.oracles import BATCH, embeds, relative, small_vit, tables, vit_batch
from timm_naflex_fast import enable
from timm_naflex_fast.resampling import kept

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here"),
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def on_gpu(batch=BATCH):
    return {name: value.cuda() for name, value in batch.items()}


def step(model, batch, run):
    """The output, and the gradients of the tables."""
    model.zero_grad()
    out = run(batch)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * weight).sum().backward()
    return [out.detach().clone(), *(table.grad.clone() for table in tables(model.embeds))]


def check_close(got, want, tolerance):
    for ours, theirs in zip(got, want, strict=True):
        assert relative(ours, theirs) <= tolerance


def check_equal(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def added(model, batch):
    """The position embeddings alone: PyTorch's own products of the model may take TF32."""
    coord = batch["patch_coord"]
    kind = model.embeds.pos_embed_type
    x = torch.zeros(*coord.shape[:2], 32, device=coord.device)
    getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


@pytest.mark.parametrize(("kind", "rope"), [("learned", "axial"), ("factorized", "dinov3")])
def test_equals_timm_the_same_bits_each_time(kind, rope, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = small_vit(pos_embed=kind, rope_type=rope).cuda()
    one_step = partial(step, model, on_gpu(), partial(added, model))
    want = one_step()
    enable()

    with during(torch.use_deterministic_algorithms, True, after=False):
        got = one_step()
        check_equal(one_step(), got)
    check_close(got, want, 1e-5)

    before = torch.get_float32_matmul_precision()
    with during(torch.set_float32_matmul_precision, "highest", after=before):
        got = one_step()
    with during(torch.set_float32_matmul_precision, "high", after=before):  # allows TF32
        check_equal(one_step(), got)
    check_close(got, want, 1e-5)


@pytest.mark.parametrize("evicted", [False, True], ids=["", "after the cache was cleared"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("whole", [False, True], ids=["embeds", "model"])
def test_cuda_graph_serves_other_grids(kind, whole, evicted):
    model = small_vit(pos_embed=kind).cuda().eval()
    batch = on_gpu()
    other = on_gpu(vit_batch([(8, 8), (7, 3), (1, 9), (2, 2), (4, 5)], seed=5))
    run = model if whole else partial(embeds, model)
    with torch.no_grad():
        want = [run(batch), run(other)]
        enable()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(batch)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        held = {name: value.clone() for name, value in batch.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(held)
        if evicted:  # what the graph reads stays, whatever comes into the memory that is free now
            kept.clear_all()
            torch.cuda.empty_cache()
            junk = torch.full((40, 2**22), torch.nan, device="cuda")  # noqa: F841
        for given, expected in zip((batch, other), want):
            for name, value in given.items():
                held[name].copy_(value)
            graph.replay()
            assert relative(out, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_forward_and_backward(mode):
    model = small_vit().cuda()
    batch = on_gpu()
    want = step(model, batch, model)
    kept.clear_all()
    with enable():
        run = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(3):  # CUDA graphs are recorded in the second
            check_close(step(model, batch, run), want, 1e-4)
