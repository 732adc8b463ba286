"""A compiled model follows all settings that are made after it was compiled, and finds its graphs
again."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow
from tests.support.oracles import small_vit, vit_batch
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import compiled as compiled_graphs

B, BACKENDS = vit_batch([(5, 7), (12, 4), (3, 3)]), ["eager", slow("inductor")]


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
    enable("grid_sample")
    for _ in range(3):
        assert gives(compiled, results) == gives(model, results) == "grid_sample"
    # One trace, three eager calls.
    assert counter.frame_count == 1 and status().calls == {("pos_embed", "grid_sample"): 4}
    enable("stock", model=model)
    assert gives(compiled, results) == "exact"
    enable("grid_sample", model=model)
    enable("matmul")
    assert gives(compiled, results) == "grid_sample"
    enable("matmul", model=model)
    assert gives(compiled, results) == "exact" and status().calls == {("pos_embed", "matmul"): 1}
    disable()
    frames = []
    for _ in range(3):
        assert gives(compiled, results) == "exact"
        with enable("grid_sample", model=model):
            assert gives(compiled, results) == "grid_sample"
            with enable("matmul", model=model):
                assert gives(compiled, results) == "exact"
            assert gives(compiled, results) == "grid_sample"
        with enable("grid_sample"), enable("interpolate_cached"):
            assert gives(compiled, results) == "exact"
        frames.append(counter.frame_count)
    # Graphs of choices that come back are found again.
    assert frames[0] == frames[1] == frames[2] or not compiled_graphs.NAMES_METHODS


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_and_a_pickle(model, results, backend):
    enable("matmul")
    with enable("grid_sample", model=model):
        copy = torch.compile(deepcopy(model), backend=backend, fullgraph=True)
        loaded = torch.compile(pickle.loads(pickle.dumps(model)), backend=backend, fullgraph=True)
        assert gives(copy, results) == "grid_sample"  # shares the settings of the model
        assert gives(loaded, results) == "exact"  # brings none along
        with enable("grid_sample", model=loaded):
            assert gives(loaded, results) == "grid_sample"
        assert gives(loaded, results) == "exact"
    assert gives(copy, results) == "exact"
    assert gives(loaded, results) == "exact" and status().calls["pos_embed", "matmul"] > 0
