"""What torch.compile and torch.export cannot make of timm's own code, and the same with this package."""

import pytest
import torch

from tests.support.oracles import OLD_TORCH, relative, small_vit, vit_batch
from tests.support.running import running

pytestmark = pytest.mark.slow
GRIDS = [[(6, 8), (8, 6)], [(4, 10), (10, 4)]]  # of images of two shapes and their like lying down


def train(model, batch, run=None):
    model.zero_grad()
    out = (model if run is None else run)(batch)
    out.square().sum().backward()
    return out.detach(), model.embeds.pos_embed.grad.clone()


@pytest.mark.skipif(OLD_TORCH, reason="about this torch's compiler")
def test_training_on_two_shapes_with_dynamic_sizes():
    """PyTorch issue 197622: the gradient of antialiased bicubic interpolation has no shape rule for free sizes."""
    model = small_vit(pos_embed_interp_mode="bicubic")
    timms = torch.compile(model, backend="aot_eager", dynamic=True)
    side = model.embeds.patch_size[0]
    with pytest.raises(Exception, match="isIntList"):
        for grids in GRIDS:
            h, w = grids[0]
            train(model, torch.randn(2, model.embeds.in_chans, h * side, w * side), timms)
    torch._dynamo.reset()
    batches = [vit_batch(grids, seed=i) for i, grids in enumerate(GRIDS)]
    wanted = [train(model, batch) for batch in batches]
    with running():
        ours = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        for batch, (want, want_grad) in zip(batches, wanted):
            got, grad = train(model, batch, ours)
            assert relative(got, want) <= 1e-5 and relative(grad, want_grad) <= 1e-5


def test_one_whole_graph():
    model, batch = small_vit(), vit_batch(GRIDS[0])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch)
    want, want_grad = train(model, batch)
    torch._dynamo.reset()
    with running():
        got, grad = train(model, batch, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert relative(got, want) <= 1e-5 and relative(grad, want_grad) <= 1e-5


@pytest.mark.skipif(OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind")
def test_export_with_dynamic_sizes():
    model, batch, other = small_vit().eval(), vit_batch(GRIDS[0]), vit_batch([(3, 5), (7, 7), (1, 4)], seed=1)
    free = {0: torch.export.Dim("B", min=1, max=64), 1: torch.export.Dim("N", min=2, max=4096)}
    free = (dict.fromkeys(batch, free),)
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(model, (batch,), dynamic_shapes=free)
    with running():
        program = torch.export.export(model, (batch,), dynamic_shapes=free).module()
    with torch.no_grad():
        assert relative(program(other), model(other)) <= 1e-5
