"""A compiled model follows all settings that are made after it was compiled, and finds its graphs
again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import product, starmap

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast import disable, enable, status

B = vit_batch([(5, 7), (12, 4), (3, 3)])
BACKENDS = ["eager", slow("inductor")]


def gives(model, results):
    """Which of two results a model gives, compiled or not."""
    got = model(B)
    (name,) = [name for name, want in results.items() if torch.allclose(got, want, atol=1e-5)]
    return name


@pytest.fixture
def model():
    return small_vit(depth=0).requires_grad_(False)


@pytest.fixture
def results(model):
    exact = model(B)
    with enable("grid_sample"):
        drifting = model(B)
    assert not torch.allclose(exact, drifting, atol=1e-4)
    return {"exact": exact, "grid_sample": drifting}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_switch_after_the_first_call_takes_effect(model, results, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    with running("grid_sample"):
        assert gives(compiled, results) == "grid_sample"
        graphs = counter.frame_count  # more than one where timm's own code samples: it breaks them
        for _ in range(2):
            assert gives(compiled, results) == "grid_sample"
        assert counter.frame_count == graphs
        with enable("stock", model=model):
            assert gives(compiled, results) == "exact"
        with enable("grid_sample", model=model), enable("matmul"):
            assert gives(compiled, results) == "grid_sample"
    for _ in range(2):
        assert gives(compiled, results) == "exact"
        with enable("grid_sample", model=model):
            assert gives(compiled, results) == "grid_sample"
            with enable("matmul", model=model):
                assert gives(compiled, results) == "exact"
            assert gives(compiled, results) == "grid_sample"


IMAGES = torch.randn(2, 1, 24, 28, generator=torch.Generator().manual_seed(0))


def siglip2():
    """transformers' embeddings, which compile to one graph, and a batch for them."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    module = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    embeddings = module.Siglip2VisionEmbeddings(config)
    return embeddings, (torch.ones(2, 20, 48), torch.tensor([(3, 5), (4, 4)]))


MADE = {
    "images": lambda: (small_vit(depth=0), (IMAGES,)),
    "coordinates": lambda: (small_vit(depth=0), (B,)),
    "siglip2": siglip2,
}


def in_a_container(model):
    """Of PyTorch's own modules the compiler takes for granted what they contain."""
    container = torch.nn.ModuleList([model])
    return torch.compile(lambda *batch: container[0](*batch), backend="eager")


def as_a_part(model):
    getattr(model, "embeds", model).compile(backend="eager")
    return model


def with_given_weights(model):
    weights = dict(model.named_parameters())
    call = torch.func.functional_call
    return torch.compile(lambda *batch: call(model, weights, batch), backend="eager")


def alone(model):
    return torch.compile(model, backend="eager")


WAYS = [in_a_container, as_a_part, with_given_weights]


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
# The long tests join every way to compile with every kind.
@pytest.mark.parametrize(
    ("compile_it", "kind"),
    [
        *product([alone], MADE),
        *product(WAYS, ["images"]),
        *starmap(slow, product(WAYS, ["coordinates", "siglip2"])),
    ],
)
def test_what_was_compiled_and_run_before_takes_what_is_chosen(kind, compile_it):
    model, batch = MADE[kind]()
    library = "transformers" if kind == "siglip2" else "timm"
    compiled = compile_it(model)
    with torch.no_grad():
        want = compiled(*batch)
        for own in (None, model):
            for mode in ("matmul", "interpolate_cached"):
                with enable(mode, model=own, library=library, strict=True):
                    torch.testing.assert_close(compiled(*batch), want, atol=1e-5, rtol=0)
                    # A graph of that mode which is found again is not traced.
                    found_again = kind == "coordinates" and own and not status().calls
                    assert found_again or status().calls.keys() == {("pos_embed", mode)}
            disable()
            assert torch.equal(compiled(*batch), want)
            assert status().calls == {}


def test_a_thread_that_compiles_may_copy_a_model_while_another_enables():
    """Compiling and copying a model take locks: neither may wait for the other."""
    model = small_vit(depth=0)
    compiles = threading.Event()
    goes_on = threading.Event()

    def backend(graph, inputs):
        compiles.set()
        assert goes_on.wait(10), "enable() waits for the compiler, and the lock is held"
        deepcopy(model)
        return graph.forward

    with enable("matmul", model=model), ThreadPoolExecutor(2) as pool:
        compiling = pool.submit(
            torch.compile(torch.nn.Linear(3, 3), backend=backend), torch.ones(3)
        )
        assert compiles.wait(30)
        disable()
        enabling = pool.submit(lambda: enable("matmul", model=model))
        while not status().replaced:
            time.sleep(0.001)
        goes_on.set()
        compiling.result(30)
        enabling.result(30).restore()


FILTER = "skip_all_guards_unsafe"


@pytest.mark.skipif(not hasattr(torch.compiler, FILTER), reason="no filters of guards")
def test_what_was_compiled_without_guards_follows_after_a_reset(model, results):
    """A filter drops the guards by which a graph would notice other settings."""
    options = {"guard_filter_fn": getattr(torch.compiler, FILTER)}
    compiled = torch.compile(model, backend=NoOptions(), options=options)
    assert gives(compiled, results) == "exact"
    with enable("grid_sample"):
        assert gives(compiled, results) == "grid_sample"
        with enable("matmul"):
            assert gives(compiled, results) == "grid_sample"
            torch._dynamo.reset()
            assert gives(compiled, results) == "exact"


class NoOptions:
    """The backend "eager", which may be given options."""

    def __call__(self, graph, inputs, **_):
        return graph.forward


def test_who_filters_no_guards_pays_nothing_for_it(model, results):
    """Graphs are forgotten where ours takes the place of the library's code, and not else."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    graphs = []
    with enable("matmul"):
        for mode in ("grid_sample", "matmul") * 3:
            with enable(mode, model=model):
                for _ in range(2):
                    gives(compiled, results)
            graphs.append(counter.frame_count)
    assert graphs[1] > graphs[0] > 0
    assert set(graphs[1:]) == {graphs[1]}
