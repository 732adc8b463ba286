"""Who traces and where the tensors are tell the backend; the form for CUDA equals PyTorch and reads nothing back."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.checks import one_by_one, reading_is_an_error
from tests.support.oracles import relative
from timm_naflex_fast.backends import dispatch, eager, operator, portable
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.resampling.matrices import ResizeSpec

TAKES = {"export": [portable] * 2, "transform": [portable] * 2, "compile": [operator, eager], None: [eager] * 2}


@pytest.mark.parametrize("who", TAKES)
def test_who_traces_tells_the_backend(who, monkeypatch):
    monkeypatch.setattr(dispatch, "tracer", lambda *_: who)
    x, tables = torch.zeros(1, 1, 4), (torch.randn(6, 5, 4),)
    strategies = ("matmul", "interpolate_cached")
    assert [dispatch._backend(x, tables, ResizeSpec(), strategy) for strategy in strategies] == TAKES[who]


def on_device(monkeypatch):
    """Let the CPU take the form that CUDA takes, with the portable one in the place of the kernels; its runs."""
    ran = []
    add = lambda *args: ran.append(tuple(args[0].shape)) or portable.add(*args)
    monkeypatch.setattr(dispatch, "_backend", lambda *_: SimpleNamespace(add=add))
    return ran


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("padding", [{}, dict(length=75, padding="zeros"), dict(length=75, padding="first")], ids=str)
@pytest.mark.parametrize("frames", [1, 3])
def test_the_form_for_cuda_equals_eager_and_reads_no_tensor(monkeypatch, merge, padding, frames):
    sizes, table = [(frames, 4, 6), (1, 6, 8), (2, 2, 2)][: 2 + (frames > 1)], torch.randn(6, 5, 8, requires_grad=True)
    want = resample_pos_embeds(table, sizes, mode="bicubic", merge=merge, **padding)
    ran, weight = on_device(monkeypatch), torch.randn_like(want)
    reading_is_an_error(monkeypatch)
    got = resample_pos_embeds(table, sizes, mode="bicubic", merge=merge, **padding)
    (grad,) = torch.autograd.grad((got * weight).sum(), table)
    monkeypatch.undo()
    assert len(ran) == 1 and got.shape == want.shape and relative(got, want) <= 2e-6
    assert relative(grad, torch.autograd.grad((want * weight).sum(), table)[0]) <= 1e-5


def test_the_form_for_cuda_does_not_pad_small_images_to_a_video(monkeypatch):
    ran, table, sizes = on_device(monkeypatch), torch.randn(6, 5, 8), [(16, 4, 4)] + [(1, 2, 2)] * 7
    got = resample_pos_embeds(table, sizes, mode="bilinear")
    assert relative(got, torch.cat(one_by_one(table, sizes, mode="bilinear"))) <= 2e-6 and not ran
    add_pos_embed_(torch.zeros(2, 16, 8), table, grid_sizes=[(4, 4), (2, 2)])
    assert ran == [(2, 16, 8)]
