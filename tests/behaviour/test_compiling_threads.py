"""PyTorch's flags of a compilation are the process's; this thread may merely run."""

import threading

import pytest
import torch

from tests.support.oracles import BATCH, relative, small_vit
from tests.support.running import running
from timm_naflex_fast import enable, status


def serving_while(work, run):
    """Results of ``run()`` in another thread while this one does ``work()``."""
    results, stop, started = [], threading.Event(), threading.Event()

    def serve():
        while not stop.is_set():
            try:
                results.append(run())
            except BaseException as error:
                results.append(error)
            started.set()

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait()
    try:
        work()
    finally:
        stop.set()
        thread.join()
    return results


def many_layers(n):
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(n)]), torch.randn(3, 8)


def compile_something():
    layers, x = many_layers(20)
    torch.compile(layers, backend="aot_eager")(x)


def export_something():
    layers, x = many_layers(40)
    torch.export.export(layers, (x,))


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached", "grid_sample"])
@pytest.mark.parametrize("work", [compile_something, export_something])
def test_a_thread_serves_the_same_bits_while_another_compiles(mode, work):
    model = small_vit().requires_grad_(False).eval()

    def run():
        x = torch.zeros(*BATCH["patch_coord"].shape[:2], 32)
        model.embeds._apply_learned_naflex_pos_embed(x, patch_coord=BATCH["patch_coord"])
        return x

    with enable(mode):
        want = run()
        results = serving_while(work, run)
        assert set(status().calls) == {("pos_embed", mode)}
    assert len(results) > 1 and all(isinstance(r, torch.Tensor) and torch.equal(r, want) for r in results)


@pytest.mark.parametrize("mode", ["matmul", "grid_sample"])
def test_a_backend_may_run_the_graph_while_it_compiles(mode):
    def backend(graph, inputs):
        graph(*inputs)  # calibrates
        return graph.forward

    model = small_vit().eval()
    with running(mode):
        want = model(BATCH)
        assert relative(torch.compile(model, backend=backend)(BATCH), want) <= 1e-5
