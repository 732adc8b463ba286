"""On a GPU: timm's result, reproducible gradients, TF32 flags without effect, CUDA graphs.

Never run on a GPU. ``test_second_device.py`` pretends to have one.
"""

from functools import partial

import pytest
import torch

from tests.support.checks import during
from tests.support.oracles import BATCH, far, relative, small_vit, trained, vit_batch
from timm_naflex_fast import enable
from timm_naflex_fast.pos_embed import kept

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here"),
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def on_gpu(batch=BATCH):
    return {name: value.cuda() for name, value in batch.items()}


def added(model, batch):
    """The position embeddings alone: PyTorch's own products of the model may take TF32."""
    coord = batch["patch_coord"]
    kind = model.embeds.pos_embed_type
    x = torch.zeros(*coord.shape[:2], 32, device=coord.device)
    getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_equals_timm_the_same_bits_each_time(kind, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model = small_vit(pos_embed=kind).cuda()
    one_step = partial(trained, model, on_gpu(), partial(added, model))
    want = one_step()
    enable()

    got = one_step()
    with during(torch.use_deterministic_algorithms, True, after=False):
        assert far(one_step(), got) == 0
    assert far(got, want) <= 1e-5

    with during(torch.set_float32_matmul_precision, "high", after="highest"):  # allows TF32
        assert far(one_step(), got) == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_cuda_graph_serves_other_grids(kind):
    model = small_vit(pos_embed=kind).cuda().eval()
    batches = [on_gpu(), on_gpu(vit_batch([(8, 8), (7, 3), (1, 9), (2, 2), (4, 5)], seed=5))]
    wants = [model(batch) for batch in batches]
    enable()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(batches[0])  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    held = {name: value.clone() for name, value in batches[0].items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(held)
    for batch, want in zip(batches, wants):
        for name, value in batch.items():
            held[name].copy_(value)
        graph.replay()
        assert relative(out, want) <= 1e-5


@pytest.mark.slow
def test_inductor_records_cuda_graphs():
    model = small_vit().cuda()
    batch = on_gpu()
    want = trained(model, batch)
    kept.clear_all()
    with enable():
        run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):  # CUDA graphs are recorded in the second
            assert far(trained(model, batch, run), want) <= 1e-4
