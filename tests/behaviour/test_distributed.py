"""Training with what stands around a model, against plain timm: DDP and FSDP2 on two gloo processes,
a scaler, an average."""

import pytest
import timm
import torch
import torch.multiprocessing as mp

from tests.support import two_processes
from tests.support.oracles import BATCH, far, small_vit, worst
from tests.support.running import running
from tests.support.two_processes import KINDS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(two_processes.work, (str(folder),), nprocs=2)
    return torch.load(folder / "results.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", two_processes.WRAPS)
def test_two_processes_train_like_one(wrap, kind, results):
    want, expected = two_processes.train(small_vit(pos_embed=kind), two_processes.WHOLE)
    losses, grads, calls = results[wrap, kind]
    assert calls == {("pos_embed", "matmul"): 3}  # one of each step
    torch.testing.assert_close(losses, want, atol=0, rtol=1e-5)
    assert worst(grads, expected) <= 2e-5


def test_grad_scaler_and_ema():
    """One of the steps is skipped; the averaged copy evaluates as timm's does."""

    def train(mode):
        model = small_vit()
        average = timm.utils.ModelEmaV3(model, decay=0.5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        with running(mode):
            for factor in (1.0, float("inf"), 1.0):
                optimizer.zero_grad()
                loss = model(BATCH).square().mean()
                scaler.scale(loss * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                average.update(model)
            with torch.no_grad():
                out = average(BATCH)
        assert scaler.get_scale() == 2.0**11
        return out, dict(average.named_parameters())

    assert far(train("matmul"), train("stock")) <= 1e-5
