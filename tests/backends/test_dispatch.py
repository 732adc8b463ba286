"""The form for graphs equals the eager one and reads nothing back."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.checks import reading_is_an_error
from tests.support.oracles import relative
from timm_naflex_fast.backends import dispatch, traceable
from timm_naflex_fast.functional import resample_pos_embeds


def as_in_a_graph(monkeypatch):
    """Let eager code take the form that graphs take; its runs."""
    ran = []
    add = lambda *args: ran.append(tuple(args[0].shape)) or traceable.add(*args)
    monkeypatch.setattr(dispatch, "_backend", lambda *_: SimpleNamespace(add=add))
    return ran


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("padding", [{}, dict(length=75, padding="zeros"), dict(length=75, padding="first")], ids=str)
@pytest.mark.parametrize("frames", [1, 3])
def test_the_form_for_graphs_equals_eager_and_reads_no_tensor(monkeypatch, merge, padding, frames):
    sizes, table = [(frames, 4, 6), (1, 6, 8), (2, 2, 2)][: 2 + (frames > 1)], torch.randn(6, 5, 8, requires_grad=True)
    want = resample_pos_embeds(table, sizes, mode="bicubic", merge=merge, **padding)
    ran, weight = as_in_a_graph(monkeypatch), torch.randn_like(want)
    reading_is_an_error(monkeypatch)
    got = resample_pos_embeds(table, sizes, mode="bicubic", merge=merge, **padding)
    (grad,) = torch.autograd.grad((got * weight).sum(), table)
    monkeypatch.undo()
    assert len(ran) == 1 and got.shape == want.shape and relative(got, want) <= 2e-6
    assert relative(grad, torch.autograd.grad((want * weight).sum(), table)[0]) <= 1e-5
