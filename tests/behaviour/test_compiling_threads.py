"""PyTorch's flags of a compilation are the process's; this thread may merely run."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from tests.support.oracles import BATCH, embed, relative, small_vit
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.names import STRATEGY_NAMES

LAYERS = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
X = torch.randn(3, 8)
WORK = {
    "compile": lambda: torch.compile(LAYERS, backend="aot_eager")(X),
    "export": lambda: torch.export.export(LAYERS, (X,)),
}


@pytest.mark.parametrize(
    ("work", "mode"), [*product(["compile"], STRATEGY_NAMES), ("export", "matmul")]
)
def test_a_thread_serves_the_same_bits_while_another_compiles(mode, work):
    model = small_vit(depth=0).requires_grad_(False)
    results = []
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            results.append(embed(model))

    with enable(mode), ThreadPoolExecutor(1) as pool:
        want = embed(model)
        serving = pool.submit(serve)
        while not (results or serving.done()):
            time.sleep(0.001)
        try:
            WORK[work]()
        finally:
            stop.set()
        serving.result()  # raises what the thread raised
        assert set(status().calls) == {("pos_embed", mode)}
    assert len(results) > 1
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("mode", ["matmul", "grid_sample"])
def test_a_backend_may_run_the_graph_while_it_compiles(mode):
    def backend(graph, inputs):
        graph(*inputs)  # calibrates
        return graph.forward

    model = small_vit(depth=0)
    with running(mode):
        assert relative(torch.compile(model, backend=backend)(BATCH), model(BATCH)) <= 1e-5
