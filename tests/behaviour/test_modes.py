"""In sight of a mode of PyTorch.

What it sees does not depend on what is kept, and nothing of what it changes is kept.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.support.checks import Watch
from tests.support.oracles import BATCH, Case, far, relative, small_vit, trained
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.pos_embed import kept

aten = torch.ops.aten
MODES = pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
# Every way to a position embedding, to rotary ones and to patch kernels.
MODELS = {
    "learned": {"rope_type": "mixed", "enable_patch_interpolator": True},
    "frozen": {"rope_type": "axial", "enable_patch_interpolator": True},
    "factorized, few tokens": {"pos_embed": "factorized", "rope_type": "axial"},
}


SAVED = [  # operators of which a checkpoint keeps what they gave
    ("sum", "view", "unbind", "mm"),
    ("mul", "split_with_sizes", "_embedding_bag", "eye"),
    ("add", "slice", "_upsample_bicubic2d_aa", "_to_copy"),
    ("cat", "stack"),
]


def model_and_batch(name):
    model = small_vit(**MODELS[name])
    batch = dict(BATCH)
    if name == "factorized, few tokens":
        return model, {key: value[3:] for key, value in batch.items()}
    model.embeds.requires_grad_(name != "frozen")
    batch["patches"] = torch.randn(*batch["patches"].shape[:2], 6, 5, 1)
    return model, batch


@MODES
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_sees_the_same_whatever_is_kept(mode, name):
    model, batch = model_and_batch(name)

    def seen():
        """The operators of one step, in their order."""
        operators = []
        with Watch(lambda func, _: operators.append(str(func))):
            trained(model, batch)
        return operators

    with running(mode, model=model):
        kept.clear_all()
        want = seen()
        for _ in range(2):
            trained(model, batch)  # fills the caches
            assert seen() == want
    assert len(want) > 100
    assert any("add_learned" in operator for operator in want)  # one call, in place of what it runs


@MODES
@pytest.mark.parametrize("name", MODELS)
def test_selective_checkpoints_give_timms_gradients(mode, name):
    model, batch = model_and_batch(name)

    def region(batch, patches):
        out = model({**batch, "patches": patches})
        mean = (out / batch["patch_valid"].sum(1, keepdim=True)).sum(1, keepdim=True)
        return out * mean.sigmoid()

    def plain(batch):
        return region(batch, batch["patches"].clone().requires_grad_())

    def checkpointed(saved, batch):
        def policy(ctx, operator, *args, **kwargs):
            if str(operator).split(".")[1] in saved:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        patches = batch["patches"].clone().requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(region, batch, patches, use_reentrant=False, context_fn=contexts)

    want = trained(model, batch, plain)
    for saved in SAVED:
        kept.clear_all()
        with running(mode, model=model):
            got = trained(model, batch, partial(checkpointed, saved))
        assert far(got, want) <= 2e-5, saved


def changed(func, out):
    """Half, or nothing, of what some operators and functions give."""
    if func in (F.interpolate, F.grid_sample, torch.eye):
        return out / 2
    return out * 0 if func in (aten.eye.default, aten.bmm.default) else out


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return changed(func, func(*args, **(kwargs or {})))


def test_plain_images_with_another_number_of_tokens_than_cells_are_an_error():
    embeds = Case().embeds()
    x = torch.zeros(1, 20, 4)
    message = r"patch_coord .* shape \(1, 20, 2\) for the shape of x; got \(1, 16, 2\)"
    with Watch(lambda *_: None), enable(model=embeds), pytest.raises(ValueError, match=message):
        embeds._apply_learned_pos_embed(x, [4, 4])


class OfOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return changed(func, func(*args, **(kwargs or {})))


@MODES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spoils", [OfFunctions, OfOperators])
def test_what_a_mode_changes_ends_with_it(mode, name, spoils):
    model, batch = model_and_batch(name)
    want = trained(model, batch)
    kept.clear_all()
    with running(mode, model=model):
        with spoils():
            trained(model, batch)
        got = trained(model, batch)
    assert far(got, want) <= 2e-5


@MODES
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_autograd_hears_of_the_write_before_it_happens(mode, kind, frozen):
    model = small_vit(pos_embed=kind)
    model.embeds.requires_grad_(not frozen)
    add = f"_apply_{kind}_naflex_pos_embed"
    x = torch.randn(*BATCH["patches"].shape[:2], 32, requires_grad=True)

    def gradient():
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = x * 2
            before = y * y
            getattr(model.embeds, add)(y, patch_coord=BATCH["patch_coord"])
            loss = before.sum() + (y**3).sum()
            return torch.autograd.grad(loss, x)[0]

    want = gradient()
    with running(mode, model=model):
        assert relative(gradient(), want) <= 1e-5
