"""In sight of a mode: what it sees does not depend on what is kept, and nothing of what it changes
is kept."""

from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.support.checks import Watch
from tests.support.oracles import BATCH, far, small_vit, trained, worst
from tests.support.running import running
from timm_naflex_fast.resampling import kept

MODES = pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
MODELS = {
    "learned": {},
    "factorized": dict(pos_embed="factorized"),
    "frozen": {},
    "rope": dict(rope_type="mixed"),
}
MODELS |= {f"{name}patch kernels": dict(enable_patch_interpolator=True) for name in ("", "frozen ")}


SAVED = "sum mul add cat view split_with_sizes slice unbind _embedding_bag _upsample_bicubic2d_aa mm eye".split()


def model_and_batch(name):
    model, batch = small_vit(**MODELS[name]), dict(BATCH)
    if "frozen" in name:
        model.embeds.requires_grad_(False)
    if "patch kernels" in name:
        batch["patches"] = torch.randn(*batch["patches"].shape[:2], 6, 5, 1)
    return model, batch


@MODES
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_sees_the_same_whatever_is_kept(mode, name):
    model, batch = model_and_batch(name)
    seen = []
    with running(mode, model=model):
        for clear in (True, False, False):
            if clear:
                kept.clear_all()
            seen.append([])  # the operators in their order
            with Watch(lambda func, _: seen[-1].append(str(func))):
                trained(model, batch)
            trained(model, batch)  # fills the caches
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 100


@MODES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpoints_give_timms_gradients(mode, name, saved):
    model, batch = model_and_batch(name)
    policy = lambda ctx, op, *a, **k: (
        CheckpointPolicy.MUST_SAVE
        if str(op).startswith(f"aten.{saved}.")
        else CheckpointPolicy.PREFER_RECOMPUTE
    )

    def region(batch, patches):
        out = model({**batch, "patches": patches})
        return (
            out * (out / batch["patch_valid"].sum(1, keepdim=True)).sum(1, keepdim=True).sigmoid()
        )

    def checkpointed(batch):
        patches = batch["patches"].clone().requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(region, batch, patches, use_reentrant=False, context_fn=contexts)

    kept.clear_all()
    want = trained(
        model, batch, lambda batch: region(batch, batch["patches"].clone().requires_grad_())
    )
    with running(mode, model=model):
        assert far(trained(model, batch, checkpointed), want) <= 2e-5


class Halved(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        resizes = func in (
            torch.nn.functional.interpolate,
            torch.nn.functional.grid_sample,
            torch.eye,
        )
        return out / 2 if resizes else out


class Zeroed(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0 if func in (torch.ops.aten.eye.default, torch.ops.aten.bmm.default) else out


@MODES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spoils", [Halved, Zeroed])
def test_what_a_mode_changes_ends_with_it(mode, name, spoils):
    model, batch = model_and_batch(name)
    want = trained(model, batch)
    kept.clear_all()
    with running(mode, model=model):
        with spoils():
            trained(model, batch)
        assert far(trained(model, batch), want) <= 2e-5


@MODES
@pytest.mark.parametrize("name", ["learned", "factorized", "frozen"])
def test_autograd_hears_of_the_write_before_it_happens(mode, name):
    model, _ = model_and_batch(name)
    coord, leaf = (
        BATCH["patch_coord"],
        torch.randn(*BATCH["patches"].shape[:2], 32, requires_grad=True),
    )
    method = f"_apply_{model.embeds.pos_embed_type}_naflex_pos_embed"

    def gradient():
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = leaf * 2
            z = y * y
            getattr(model.embeds, method)(y, patch_coord=coord)
            (z.sum() + (y**3).sum()).backward()
        grad, leaf.grad = leaf.grad, None
        return {"leaf": grad}

    want = gradient()
    with running(mode, model=model):
        assert worst(gradient(), want) <= 1e-5
