"""A compiled model follows every choice that is made after it was compiled, and finds its graphs again."""

import pickle

import pytest
import torch
from oracles import is_pristine, small_vit, vit_batch
from torch._dynamo.testing import CompileCounterWithBackend

from timm_naflex_fast import disable, enable, status

B = vit_batch([(5, 7), (12, 4), (3, 3)])
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


@torch.no_grad()
def gives(compiled, results):
    """Which of two results a compiled model gives."""
    got = compiled(B)
    (name,) = [name for name, want in results.items() if torch.allclose(got, want, atol=1e-5)]
    return name


@pytest.fixture
def model():
    return small_vit()


@pytest.fixture
def results(model):
    with torch.no_grad():
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
    assert gives(compiled, results) == "grid_sample"
    enable("stock", model=model)
    assert gives(compiled, results) == "exact"
    enable("grid_sample", model=model)
    enable("matmul")
    assert gives(compiled, results) == "grid_sample"
    enable("matmul", model=model)
    assert gives(compiled, results) == "exact" and status().calls == {("pos_embed", "matmul"): 1}
    enable("grid_sample", model=model)
    disable(model)
    assert gives(compiled, results) == "exact"
    disable()
    frames = []
    for _ in range(3):
        assert gives(compiled, results) == "exact"
        with enable("grid_sample", model=model):
            assert gives(compiled, results) == "grid_sample"
            with enable("matmul", model=model):
                assert gives(compiled, results) == "exact"
            assert gives(compiled, results) == "grid_sample"
        with enable("grid_sample"):
            assert gives(compiled, results) == "grid_sample"
            with enable("interpolate_cached"):
                assert gives(compiled, results) == "exact"
            with enable("matmul", model=model):
                assert gives(compiled, results) == "exact"
            assert gives(compiled, results) == "grid_sample"
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] == frames[2]  # graphs of choices that come back are found again


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_that_came_out_of_a_pickle(model, results, backend):
    enable("grid_sample", model=model)
    copy = pickle.loads(pickle.dumps(model))
    compiled = torch.compile(copy, backend=backend, fullgraph=True)
    assert gives(compiled, results) == "grid_sample"
    assert status().models[0].pos_embed == "grid_sample"
    enable("matmul")
    assert gives(compiled, results) == "grid_sample"
    enable("matmul", model=copy)
    assert gives(compiled, results) == "exact"
    disable()
    assert is_pristine()
    enable("matmul")
    again = torch.compile(pickle.loads(pickle.dumps(copy)), backend=backend, fullgraph=True)
    assert gives(again, results) == "exact" and status().calls == {("pos_embed", "matmul"): 1}


@pytest.mark.usefixtures("clean")
def test_a_pickled_choice_of_before_disable_is_not_followed_when_compiled(model, results):
    enable("grid_sample", model=model)
    data = pickle.dumps(model)
    disable()
    enable("matmul")
    assert gives(torch.compile(pickle.loads(data), backend="eager", fullgraph=True), results) == "exact"


@pytest.mark.usefixtures("clean")
def test_counting_does_not_recompile(model):
    enable("matmul")
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            compiled(B)
            model(B)
    assert counter.frame_count == 1
    assert status().calls["pos_embed", "matmul"] == 5  # one trace and four eager calls
