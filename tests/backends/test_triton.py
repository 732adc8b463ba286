"""The Triton kernels against timm's own code and float64 truth, the trial before each kind of them, and CUDA graphs.

They run on a GPU, or by Triton's interpreter on the CPU. Triton decides at import whether it interprets, so
``test_by_the_interpreter`` runs the rest of this file, and what ``contract/test_backends.py`` asks of every backend, in
processes of their own. What it cannot show, races and the compiled code, ``test_triton_kernels.py`` does; neither shows
time.
"""

import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.interpreter import DEVICE, HAS_TRITON, INTERPRETED, runs
from tests.support.interpreter import add as ours  # without a trial
from tests.support.oracles import Case, relative, row_major, stock
from timm_naflex_fast import tracing
from timm_naflex_fast.backends import operator
from timm_naflex_fast.backends import triton as matmul_triton
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.resampling import cache
from timm_naflex_fast.resampling.matrices import ResizeSpec

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
BASE = Case(sizes=[(2, 3), (4, 2), (3, 4), (2, 3)], table_size=(3, 4), channels=5, length=13)
KINDS = ["in place", "copy", "gradient"]
LIKE, SHAPE = torch.zeros(1, 4, 16, device=DEVICE), torch.Size((6, 5, 16))
agrees = partial(matmul_triton.agrees, LIKE, SHAPE, ResizeSpec())


@pytest.fixture(autouse=True)
def no_trial_yet(monkeypatch):
    monkeypatch.setattr(matmul_triton, "_agreed", {})


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests run here")
@pytest.mark.parametrize("file", ["test_triton.py", "../contract/test_backends.py"])
def test_by_the_interpreter(file):
    which = "triton and not (bfloat16 or half or autocast or forty)"  # it truncates bfloat16
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", which]
    command = [sys.executable, "-m", "pytest", *options, Path(__file__).parent / file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_launched_where_autograd_forbids_to_write(monkeypatch):
    launch, table = Mock(), torch.zeros(3, 4, 4)
    for name, stands_in in (("agrees", Mock()), ("read_batch", Mock()), ("launch_forward", launch)):
        monkeypatch.setattr(matmul_triton, name, stands_in)
    x = torch.zeros(1, 12, 8, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=r"multiple views|in-?place"):
        matmul_triton.add(x.split(4, -1)[1], (table,), row_major([(3, 4)]), ResizeSpec())
    assert not launch.called
    matmul_triton.add(x[..., :4], (table,), row_major([(3, 4)]), ResizeSpec())
    assert launch.called


@runs
def test_out_of_place_copies_padding_bit_by_bit():
    table, coord = torch.randn(3, 4, 130, device=DEVICE), BASE.coord().to(DEVICE)
    x = torch.full((4, 13, 130), -0.0, device=DEVICE)
    out, plan = torch.empty_like(x), matmul_triton.read_batch(coord, x.device, table.shape, ResizeSpec())
    matmul_triton.launch_forward(x, out, table, plan, ResizeSpec())
    assert (x == 0).all() and torch.signbit(x).all()
    matmul_triton.launch_forward(x, x, table, plan, ResizeSpec())
    assert torch.equal(out.view(torch.int32), x.view(torch.int32)) and (x != 0).any()


@runs
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_operators_take_an_empty_batch(shape):
    x, table, coord = (torch.zeros(*s, device=DEVICE) for s in ((*shape, 5), (6, 5, 5), (*shape, 2)))
    assert matmul_triton.operator_sum(x, table, coord, ResizeSpec()).shape == x.shape
    assert torch.equal(matmul_triton.operator_gradient(x, table.shape, coord, ResizeSpec()), table)


@runs
def test_operators_pass_opcheck():
    how, coord = ("bilinear", True, False, False, "interpolate"), row_major([(1, 2)]).to(DEVICE)
    x, table = (torch.randn(*shape, 2, device=DEVICE, requires_grad=True) for shape in ((1, 2), (2, 1)))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]  # with dynamic shapes: ten seconds more
    checks += ["test_aot_dispatch_dynamic"] * (not INTERPRETED)
    torch.library.opcheck(operator.on_triton.add, (x, table, coord, *how), test_utils=checks)
    torch.library.opcheck(operator.on_triton.grad, (x.detach(), coord, 2, 1, *how), test_utils=checks)


@runs
@pytest.mark.parametrize("trained", [False, True])
def test_whoever_saved_x_hears_that_it_changed(trained):
    x = torch.ones(4, 13, 5, device=DEVICE, requires_grad=True) * 1
    out = x.sin()  # saves x
    with torch.no_grad():
        ours(BASE, BASE.embeds().requires_grad_(trained), x, BASE.coord())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def timms_and_ours(case, coord, got):
    embeds, want = case.embeds().requires_grad_(False), case.x()
    stock(case, embeds, want, case.coord())
    ours(case, embeds, got, coord)
    return want, got.cpu()


close = partial(torch.testing.assert_close, atol=5e-6, rtol=0, equal_nan=True)


@runs
@pytest.mark.parametrize("value", [-1, 2000, float("nan"), float("inf"), 1e9, 2.0**40])
def test_a_coordinate_that_no_grid_can_have_is_nan_and_counted(value):
    """A negative one costs its token, any other its sample: never a wrong number."""
    before, coord = matmul_triton.lost_tokens(), BASE.coord(torch.float32)
    coord[1, 3, 0] = value
    want, got = timms_and_ours(BASE, coord, BASE.x())
    want[(1, 3) if value == -1 else 1] = torch.nan
    close(got, want)
    assert matmul_triton.lost_tokens() - before == (1 if value == -1 else 13)


def test_more_tokens_than_there_are_lengths_take_another_form(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    table = torch.zeros(3, 4, 2)
    assert [matmul_triton.serves(torch.zeros(1, n, 2), table, ResizeSpec()) for n in (4095, 4096)] == [True, False]


@runs
def test_a_misaligned_tensor_never_meets_a_kernel(monkeypatch):
    launch = Mock(wraps=matmul_triton.launch_forward)
    monkeypatch.setattr(matmul_triton, "launch_forward", launch)
    x = torch.empty(BASE.x().numel() + 1, device=DEVICE)[1:].view(BASE.x().shape).copy_(BASE.x())
    close(*timms_and_ours(BASE, BASE.coord(), x))
    (args,) = (call.args for call in launch.call_args_list)
    assert x.data_ptr() % 16 and {t.data_ptr() % 16 for t in args if isinstance(t, torch.Tensor)} == {0}


@runs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_trial_finds_kernels_right(kind, dtype):
    assert matmul_triton.agrees(LIKE.to(dtype), SHAPE, ResizeSpec(), kind)


@runs
@pytest.mark.filterwarnings("ignore:timm_naflex_fast. Triton's kernels.*results are not those of the CPU")
@pytest.mark.parametrize("form", ["eager", "compiled", "compiled, dynamic"])
@pytest.mark.parametrize("errs", [False, True], ids=["right", "wrong"])
def test_after_a_trial_the_kernels_serve_or_the_numbers_are_the_cpus(form, errs, monkeypatch):
    """In the place of wrong kernels the exact form runs, and backward: eager or in a graph, static or dynamic."""
    add = lambda x, table, coord: add_pos_embed_(x * 1, table, coord)
    want = [step(add, "cpu", samples) for samples in (5, 3)]
    if DEVICE == "cpu":
        monkeypatch.setattr(matmul_triton, "serves", lambda *_: True)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    launched, attempt = [], Mock(wraps=matmul_triton._try)
    launch, grad = matmul_triton.launch_forward, matmul_triton.table_grad

    def watched(x, out, *rest):
        launched.append(len(x))
        launch(x, out, *rest)
        out.mul_(1 + 1e-5 * errs)

    monkeypatch.setattr(matmul_triton, "_try", attempt)
    monkeypatch.setattr(matmul_triton, "launch_forward", watched)
    monkeypatch.setattr(matmul_triton, "table_grad", lambda *args: grad(*args) * (1 + 5e-5 * errs))
    if form != "eager":
        add = torch.compile(add, backend="aot_eager", fullgraph=True, dynamic="dynamic" in form)
    for samples, expected in zip((5, 3), want):
        for a, b in zip(step(add, DEVICE, samples), expected):
            assert torch.equal(a, b) if errs else relative(a, b) <= 1e-5
    assert (3 in launched) != errs  # a trial has 5 samples
    kinds = ["in place" if form == "eager" else "copy"]
    if not (errs and form == "eager"):  # which stays with the exact form, its gradient too
        kinds.append("gradient")
    assert [call.args[-1] for call in attempt.call_args_list] == kinds


def step(add, device, batch):
    generator = torch.Generator().manual_seed(batch)
    shapes = (batch, 13, 5), (3, 4, 5)
    x, table = (torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in shapes)
    out = add(x, table, row_major(([(2, 3), (4, 2), (3, 4)] * 2)[:batch], 13).to(device))
    grads = torch.autograd.grad(out, [x, table], torch.linspace(-1, 1, out.numel()).view_as(out).to(device))
    return [t.detach().cpu() for t in (out, *grads)]


@runs
def test_a_failed_trial_warns_once_and_says_why_and_one_without_memory_is_made_again(monkeypatch):
    read, grad = matmul_triton.read_batch, matmul_triton.table_grad
    monkeypatch.setattr(matmul_triton, "read_batch", Mock(side_effect=torch.cuda.OutOfMemoryError))
    assert not agrees("copy")
    monkeypatch.setattr(matmul_triton, "read_batch", read)
    assert agrees("copy")
    monkeypatch.setattr(matmul_triton, "table_grad", lambda *args: grad(*args) * (1 + 5e-5))
    with pytest.warns(UserWarning, match="results are not those of the CPU") as told:
        assert [agrees("gradient") for _ in range(3)] == [False] * 3
    assert len(told) == 1


def capturing(monkeypatch):
    monkeypatch.setattr(tracing, "in_cuda_graph", lambda device: True)
    monkeypatch.setattr(cache, "in_cuda_graph", lambda device: True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_trial_in_a_cuda_graph_but_an_error_that_says_what_to_do(kind, monkeypatch):
    capturing(monkeypatch)
    with pytest.raises(RuntimeError, match="run the model once before you capture"):
        agrees(kind)
    assert matmul_triton._agreed == {}  # the next call outside a capture finds out
    key = (LIKE.device, LIKE.dtype, SHAPE, ResizeSpec(), kind)
    matmul_triton._agreed[key] = True
    assert agrees(kind)
    matmul_triton._agreed[key] = False
    with pytest.raises(RuntimeError, match="gave other numbers than the CPU"):
        agrees(kind)


def test_bands_that_a_cuda_graph_reads_are_made_in_a_thread_of_their_own_and_kept_for_good(monkeypatch):
    """A pool of ``mode="reduce-overhead"`` belongs to the thread that asked for it."""
    args, threads, make = ((3, 4), ResizeSpec(), LIKE.device, 8), [], matmul_triton.make_bands
    watched = lambda *args: threads.append(threading.current_thread()) or make(*args)
    monkeypatch.setattr(matmul_triton, "make_bands", watched)
    monkeypatch.setattr(cache, "_pinned", {})
    bands = matmul_triton._bands(*args)
    capturing(monkeypatch)
    assert cache.pinned(matmul_triton._bands(*args), args[2]) is bands
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
    watched = weakref.ref(bands.weights)
    del bands
    cache.clear_all()
    assert watched() is not None
    cache._pinned.clear()
    assert watched() is None
