"""On a GPU: timm's result, reproducible gradients, TF32 flags without effect. Never run: no GPU was available."""

import pytest
import torch
from oracles import BATCH, relative, small_vit

from timm_naflex_fast import enable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none here")
KINDS = ["learned", "factorized"]


def on_gpu(kind):
    return small_vit(pos_embed=kind).cuda(), {name: value.cuda() for name, value in BATCH.items()}


def embeds(model, batch):
    out = model.embeds(batch["patches"], patch_coord=batch["patch_coord"])
    return out[0] if isinstance(out, tuple) else out


def step(model, batch):
    model.zero_grad()
    out = embeds(model, batch)
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return [out.detach(), *(p.grad.clone() for n, p in model.embeds.named_parameters() if n.startswith("pos_embed"))]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_timm(kind):
    model, batch = on_gpu(kind)
    want = step(model, batch)
    enable()
    assert all(relative(a, b) <= 1e-5 for a, b in zip(step(model, batch), want))


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_bit_for_bit(kind, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, batch = on_gpu(kind)
    enable()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(model, batch), step(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", KINDS)
def test_tf32_flags_change_nothing(kind):
    model, batch = on_gpu(kind)
    enable()
    x, table = (
        torch.zeros(*batch["patch_coord"].shape[:2], 32, device="cuda"),
        getattr(model.embeds, "pos_embed" if kind == "learned" else "pos_embed_y"),
    )
    add = getattr(model.embeds, f"_apply_{kind}_naflex_pos_embed")
    results, before = [], torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        try:
            torch.set_float32_matmul_precision(precision)
            out = x.clone()
            add(out, patch_coord=batch["patch_coord"])
            results.append((out.detach(), torch.autograd.grad(out.square().sum(), table)[0]))
        finally:
            torch.set_float32_matmul_precision(before)
    assert all(map(torch.equal, *results))
