"""The Triton kernels against timm's own code and float64 truth: on a GPU, or run by Triton's interpreter on the CPU.

Triton decides at import whether it interprets, so ``test_by_the_interpreter`` runs the rest of this file, and what
``contract/test_backends.py`` asks of every backend, in processes of their own. What it cannot show, races and the
compiled code, ``test_triton_kernels.py`` does; neither shows time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.checks import as_close_to_float64_as_timm, reading_is_an_error, run
from tests.support.interpreter import DEVICE, HAS_TRITON, INTERPRETED, runs
from tests.support.oracles import NEW_TIMM, Case, row_major, stock
from timm_naflex_fast.backends import operator
from timm_naflex_fast.backends import triton as matmul_triton
from timm_naflex_fast.resampling.matrices import ResizeSpec

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
BASE = Case(sizes=[(2, 3), (4, 2), (3, 4), (2, 3)], table_size=(3, 4), channels=5, length=13)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """Without the trial before each kernel, of which ``test_trial.py`` is."""
    monkeypatch.setattr(matmul_triton, "agrees", lambda *_: True)


def ours(case, embeds, x, coord):
    matmul_triton.add(x, (embeds.pos_embed,), coord, case.spec)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests run here")
@pytest.mark.parametrize("file", ["test_triton.py", "test_trial.py", "../contract/test_backends.py"])
def test_by_the_interpreter(file):
    which = "(triton or trial) and not (bfloat16 or half or autocast or forty)"  # it truncates bfloat16
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", which]
    command = [sys.executable, "-m", "pytest", *options, Path(__file__).parent / file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_launched_where_autograd_forbids_to_write(monkeypatch):
    launched, table = [], torch.zeros(3, 4, 4)
    monkeypatch.setattr(matmul_triton, "read_batch", lambda *_: None)
    monkeypatch.setattr(matmul_triton, "launch_forward", lambda *_: launched.append(1))
    x = torch.zeros(1, 12, 8, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=r"multiple views|in-?place"):
        matmul_triton.add(x.split(4, -1)[1], (table,), row_major([(3, 4)]), ResizeSpec())
    assert not launched
    matmul_triton.add(x[..., :4], (table,), row_major([(3, 4)]), ResizeSpec())
    assert launched


@runs
@pytest.mark.parametrize("antialias", [True, False] if NEW_TIMM else [True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_is_as_close_to_float64_as_timm(antialias, mode):
    case = Case(sizes=[(3, 4), (9, 2)], table_size=(7, 6), channels=512, mode=mode, antialias=antialias, seed=11)
    as_close_to_float64_as_timm(ours, case, DEVICE)


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
def test_nothing_is_read_back_to_the_host(monkeypatch):
    embeds, coord = BASE.embeds().to(DEVICE), BASE.coord().to(DEVICE)
    run(ours, BASE, embeds, coord)
    reading_is_an_error(monkeypatch)
    out = BASE.x().to(DEVICE).requires_grad_() * 1
    ours(BASE, embeds, out, coord)
    out.sum().backward()


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
        ours(BASE, BASE.embeds().to(DEVICE).requires_grad_(trained), x, BASE.coord().to(DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@runs
@pytest.mark.parametrize("value", [-1, 2000, float("nan"), float("inf"), 1e9, 2.0**40])
def test_a_coordinate_that_no_grid_can_have_is_nan_and_counted(value):
    """A negative one costs its token, any other its sample: never a wrong number."""
    before, coord = matmul_triton.lost_tokens(), BASE.coord(torch.float32)
    embeds, want, got = BASE.embeds().requires_grad_(False), BASE.x(), BASE.x().to(DEVICE)
    coord[1, 3, 0] = value
    stock(BASE, embeds, want, BASE.coord())
    ours(BASE, embeds.to(DEVICE), got, coord.to(DEVICE))
    want[(1, 3) if value == -1 else 1] = torch.nan
    torch.testing.assert_close(got.cpu(), want, atol=5e-6, rtol=0, equal_nan=True)
    assert matmul_triton.lost_tokens() - before == (1 if value == -1 else 13)


@runs
@pytest.mark.parametrize("high", [True, False])
def test_as_long_as_the_tokens_are_many_none_is_lost(high):
    n = matmul_triton.LENGTHS[0] + 76
    case = Case(sizes=[(n, 1) if high else (1, n)], table_size=(3, 4), channels=2)
    embeds, want, got = case.embeds().requires_grad_(False), case.x(), case.x().to(DEVICE)
    stock(case, embeds, want, case.coord())
    ours(case, embeds.to(DEVICE), got, case.coord().to(DEVICE))
    torch.testing.assert_close(got.cpu(), want, atol=5e-6, rtol=0)


def test_more_tokens_than_there_are_lengths_take_another_form(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    table = torch.zeros(3, 4, 2)
    assert [matmul_triton.serves(torch.zeros(1, n, 2), table, ResizeSpec()) for n in (4095, 4096)] == [True, False]


@runs
def test_a_misaligned_tensor_never_meets_a_kernel(monkeypatch):
    seen, launch = [], matmul_triton.launch_forward

    def look(*args):
        seen.extend(t.data_ptr() % 16 for t in args if isinstance(t, torch.Tensor))
        launch(*args)

    monkeypatch.setattr(matmul_triton, "launch_forward", look)
    embeds, want = BASE.embeds().requires_grad_(False), BASE.x()
    stock(BASE, embeds, want, BASE.coord())
    room = torch.empty(want.numel() + 1, device=DEVICE)[1:].view(want.shape).copy_(BASE.x())
    ours(BASE, embeds.to(DEVICE), room, BASE.coord().to(DEVICE))
    assert room.data_ptr() % 16 and set(seen) == {0}
    torch.testing.assert_close(room.cpu(), want, atol=5e-6, rtol=0)
