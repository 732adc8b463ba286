"""The trial before each kind of Triton kernel, and what CUDA graphs need; ``test_triton.py`` runs it interpreted."""

import threading
import weakref

import pytest
import torch

from tests.support.interpreter import DEVICE, HAS_TRITON, runs
from tests.support.oracles import relative, row_major
from timm_naflex_fast import tracing
from timm_naflex_fast.backends import triton as matmul_triton
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.resampling import cache
from timm_naflex_fast.resampling.matrices import ResizeSpec

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def no_trial_yet(monkeypatch):
    monkeypatch.setattr(matmul_triton, "_agreed", {})


KINDS = ["in place", "copy", "gradient"]
SHAPE = torch.Size((6, 5, 16))


@runs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_trial_finds_kernels_right_and_is_made_once(kind, dtype, monkeypatch):
    like, calls, attempt = torch.zeros(1, 4, 16, dtype=dtype, device=DEVICE), [], matmul_triton._try
    monkeypatch.setattr(matmul_triton, "_try", lambda *key: calls.append(key) or attempt(*key))
    assert all(matmul_triton.agrees(like, SHAPE, ResizeSpec(), kind) for _ in range(2))
    assert calls == [(like.device, dtype, SHAPE, ResizeSpec(), kind)]


def err(monkeypatch):
    """Kernels whose results are off by one in 100,000."""
    launch, grad = matmul_triton.launch_forward, matmul_triton.table_grad
    wrong = lambda x, out, *rest: launch(x, out, *rest) or out.mul_(1 + 1e-5)
    monkeypatch.setattr(matmul_triton, "launch_forward", wrong)
    monkeypatch.setattr(matmul_triton, "table_grad", lambda *args: grad(*args) * (1 + 5e-5))


@runs
@pytest.mark.filterwarnings("ignore:timm_naflex_fast. Triton's kernels")
@pytest.mark.parametrize("form", ["eager", "compiled", "compiled, dynamic"])
@pytest.mark.parametrize("errs", [False, True], ids=["right", "wrong"])
def test_after_a_trial_the_kernels_serve_or_the_numbers_are_the_cpus(form, errs, monkeypatch):
    """In the place of wrong kernels the exact form runs, and backward: eager or in a graph, static or dynamic."""
    add = lambda x, table, coord: add_pos_embed_(x * 1, table, coord)
    want = [step(add, "cpu", samples) for samples in (5, 3)]
    if DEVICE == "cpu":
        monkeypatch.setattr(matmul_triton, "serves", lambda *_: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    if errs:
        err(monkeypatch)
    tried, launched, attempt, launch = [], [], matmul_triton._try, matmul_triton.launch_forward
    monkeypatch.setattr(matmul_triton, "_try", lambda *key: tried.append(key[-1]) or attempt(*key))
    monkeypatch.setattr(matmul_triton, "launch_forward", lambda x, *rest: launched.append(len(x)) or launch(x, *rest))
    if form != "eager":
        add = torch.compile(add, backend="aot_eager", fullgraph=True, dynamic="dynamic" in form)
    for samples, expected in zip((5, 3), want):
        for a, b in zip(step(add, DEVICE, samples), expected):
            assert torch.equal(a, b) if errs else relative(a, b) <= 1e-5
    assert (3 in launched) != errs  # a trial has 5 samples
    kinds = {"in place"} if form == "eager" else {"copy"}
    if not (errs and form == "eager"):  # which stays with the exact form, its gradient too
        kinds.add("gradient")
    assert len(tried) == len(kinds) and set(tried) == kinds


def step(add, device, batch):
    generator = torch.Generator().manual_seed(batch)
    x, table = (
        torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in ((batch, 13, 5), (3, 4, 5))
    )
    out = add(x, table, row_major(([(2, 3), (4, 2), (3, 4)] * 2)[:batch], 13).to(device))
    grads = torch.autograd.grad(out, [x, table], torch.linspace(-1, 1, out.numel()).view_as(out).to(device))
    return [t.detach().cpu() for t in (out, *grads)]


@runs
def test_a_failed_trial_warns_once_and_says_why(monkeypatch):
    err(monkeypatch)
    like = torch.zeros(1, 4, 16, device=DEVICE)
    with pytest.warns(UserWarning, match="results are not those of the CPU") as told:
        found = [matmul_triton.agrees(like, SHAPE, ResizeSpec(), "copy") for _ in range(3)]
    assert found == [False] * 3 and len(told) == 1


@runs
def test_a_trial_without_memory_is_made_again(monkeypatch):
    like, read = torch.zeros(1, 4, 16, device=DEVICE), matmul_triton.read_batch

    def no_memory(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(matmul_triton, "read_batch", no_memory)
    assert not matmul_triton.agrees(like, SHAPE, ResizeSpec(), "copy")
    monkeypatch.setattr(matmul_triton, "read_batch", read)
    assert matmul_triton.agrees(like, SHAPE, ResizeSpec(), "copy")


def capturing(monkeypatch, now=True):
    monkeypatch.setattr(tracing, "in_cuda_graph", lambda device: now)
    monkeypatch.setattr(cache, "in_cuda_graph", lambda device: now)


@pytest.mark.parametrize("kind", KINDS)
def test_no_trial_in_a_cuda_graph_but_an_error_that_says_what_to_do(kind, monkeypatch):
    like = torch.zeros(1, 4, 16, device=DEVICE)
    agrees = lambda: matmul_triton.agrees(like, SHAPE, ResizeSpec(), kind)
    capturing(monkeypatch)
    with pytest.raises(RuntimeError, match="run the model once before you capture"):
        agrees()
    assert matmul_triton._agreed == {}  # the next call outside a capture finds out
    key = (like.device, like.dtype, SHAPE, ResizeSpec(), kind)
    matmul_triton._agreed[key] = True
    assert agrees()
    matmul_triton._agreed[key] = False
    with pytest.raises(RuntimeError, match="gave other numbers than the CPU"):
        agrees()


def test_bands_that_a_cuda_graph_reads_are_kept_for_good(monkeypatch):
    args = (3, 4), ResizeSpec(), torch.device(DEVICE), 8
    monkeypatch.setattr(cache, "_pinned", {})
    capturing(monkeypatch)
    with pytest.raises(RuntimeError, match="run the model once before you capture"):
        matmul_triton._bands(*args)
    capturing(monkeypatch, False)
    bands = matmul_triton._bands(*args)
    capturing(monkeypatch)
    assert cache.pinned(matmul_triton._bands(*args), args[2]) is bands
    watched = weakref.ref(bands.weights)
    del bands
    cache.clear_all()
    assert watched() is not None
    cache._pinned.clear()
    assert watched() is None


def test_what_is_kept_is_allocated_in_a_thread_of_its_own(monkeypatch):
    """A pool of ``mode="reduce-overhead"`` belongs to the thread that asked for it."""
    threads, make = [], matmul_triton.make_bands
    watched = lambda *args: threads.append(threading.current_thread()) or make(*args)
    monkeypatch.setattr(matmul_triton, "make_bands", watched)
    matmul_triton._bands((3, 4), ResizeSpec(), torch.device(DEVICE), 9)
    assert threads and threads[0] is not threading.current_thread()
