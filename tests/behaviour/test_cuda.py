"""On a GPU: timm's result, reproducible gradients, TF32 flags without effect, no waiting, CUDA
graphs.

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
    model.zero_grad()
    out = run(batch)
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return [out.detach().clone(), *(table.grad.clone() for table in tables(model.embeds))]


def added(model, batch):
    """The position embeddings alone: PyTorch's own products of the model may take TF32."""
    coord, kind = batch["patch_coord"], model.embeds.pos_embed_type
    x = torch.zeros(*coord.shape[:2], 32, device=coord.device)
    getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


@pytest.mark.parametrize(("kind", "rope"), [("learned", "axial"), ("factorized", "dinov3")])
def test_equals_timm_the_same_bits_each_time(kind, rope, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, batch = small_vit(pos_embed=kind, rope_type=rope).cuda(), on_gpu()
    run, before = partial(added, model), torch.get_float32_matmul_precision()
    want = step(model, batch, run)
    enable()
    with during(torch.use_deterministic_algorithms, True, after=False):
        same = [step(model, batch, run) for _ in range(2)]
    by_precision = []
    for precision in ("highest", "high"):  # the second allows TF32
        with during(torch.set_float32_matmul_precision, precision, after=before):
            by_precision.append(step(model, batch, run))
    assert all(map(torch.equal, *same)) and all(map(torch.equal, *by_precision))
    assert all(
        relative(a, b) <= 1e-5 for got in (same[0], by_precision[0]) for a, b in zip(got, want)
    )


@pytest.mark.parametrize("evicted", [False, True], ids=["", "after the cache was cleared"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("whole", [False, True], ids=["embeds", "model"])
def test_cuda_graph_serves_other_grids(kind, whole, evicted):
    model, batch = small_vit(pos_embed=kind).cuda().eval(), on_gpu()
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
        held, graph = {name: value.clone() for name, value in batch.items()}, torch.cuda.CUDAGraph()
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
    model, batch = small_vit().cuda(), on_gpu()
    want = step(model, batch, model)
    kept.clear_all()
    with enable():
        run = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(3):  # CUDA graphs are recorded in the second
            got = step(model, batch, run)
            assert all(relative(a, b) <= 1e-4 for a, b in zip(got, want))
