"""What several tests do: set and put back, watch operators, run a case in one of its forms."""

import resource
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.oracles import seeded, tables
from tests.support.running import running
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_

slow = partial(pytest.param, marks=pytest.mark.slow)  # what only ``pytest -m slow`` runs
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def during(change, value, after):
    """Inside, what ``change(value)`` sets; at the end ``change(after)``."""
    change(value)
    try:
        yield
    finally:
        change(after)


def full_disk(size):
    """Inside, no file may become larger than so many bytes: then writing fails as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    return during(limit, (size, most), (before, most))


class Watch(TorchDispatchMode):
    """Inside, ``see(func, args)`` is called with every operator before it runs."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.see(func, (*args, *kwargs.values()))
        return func(*args, **kwargs)


def by_timms_method(case, embeds, x, coord, strategy):
    """By timm's own method, replaced: so grid_sample has the installed timm's positions."""
    with running(strategy, model=embeds):
        getattr(embeds, f"_apply_{case.kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


def by_functions(case, embeds, x, coord, strategy="matmul"):
    """What ``stock`` does, by this package's plain functions."""
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, strategy=strategy, **case.options)
    options = dict(strategy=strategy, ar_preserving=case.ar_preserving)
    return add_factorized_pos_embed_(x, *tables(embeds), coord, **options)


def run(add, case, embeds, coord, x=None):
    """Output, gradient of x and gradients of the tables, for a fixed random upstream gradient."""
    x = case.x() if x is None else x
    leaf = x.requires_grad_()
    out = add(case, embeds, leaf * 1, coord)  # timm adds into an activation, not into a leaf
    how = dict(generator=seeded(3), device="cpu", dtype=torch.float32)  # whatever the defaults are
    weight = torch.randn(out.shape, **how).to(out)
    grads = torch.autograd.grad((out * weight).sum(), [leaf, *tables(embeds)])
    return out.detach(), grads[0], grads[1:]


def written(how, module, *inputs):
    """A module as a graph."""
    if how == "compile":
        return torch.compile(module, backend="aot_eager", fullgraph=True)
    if how == "make_fx":
        return make_fx(module)(*inputs)
    if how == "trace":
        return torch.jit.trace(module, inputs, check_trace=False)
    return torch.export.export(module, inputs, strict=False).module()


def one_by_one(
    table,
    sizes,
    *,
    dtype=None,
    mode,
    antialias=True,
    align_corners=False,
    ar_preserving=False,
    merge=1,
):
    """Each image's embeddings, (t*h*w, C), by F.interpolate in ``dtype``, float64 unless told."""
    out = []
    how = dict(mode=mode, antialias=antialias, align_corners=align_corners)
    for size in sizes:
        t, h, w = (1, *size) if len(size) == 2 else size
        grid = table.to(dtype or torch.float64)
        if (h, w) != tuple(table.shape[:2]):
            to = (max(h, w), max(h, w)) if ar_preserving else (h, w)
            # At width 1 only timm's layout, with a batch axis, comes back right from PyTorch.
            grid = grid[None].contiguous().permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=to, **how)[0].permute(1, 2, 0)
            grid = grid[:h, :w]
        blocks = grid.reshape(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        out.append(blocks.reshape(h * w, -1).repeat(t, 1))
    return out
