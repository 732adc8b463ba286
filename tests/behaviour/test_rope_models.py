"""Rotary embeddings inside whole models, in graphs, and as a flag."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import timm.layers.pos_embed_sincos as timms
import torch
from torch.utils import checkpoint

from tests.support.checks import slow, written
from tests.support.oracles import OLD_TORCH, far, relative, small_vit, trained, vit_batch, worst
from tests.support.rotary import CLASSES, FIELDS, NEW_TIMM, as_tensor, build, ours
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching import decide, library
from timm_naflex_fast.patching import timm as replacements

KINDS = [kind for kind in CLASSES if kind != "dinov3" or "rope_rotate_half" in FIELDS]
# What timm itself can run as a whole model.
RUNS = [kind for kind in KINDS if kind != "mixed" or NEW_TIMM]
BATCH = vit_batch([(3, 4), (12, 9), (3, 4), (8, 8), (4, 9)] * 4)
OTHER = vit_batch([(12, 9), (2, 2), (5, 6), (1, 9), (10, 10)] * 4, seed=2)
REFUSES = pytest.mark.skipif(OLD_TORCH, reason="this torch's export refuses writing in place")
COMPILED = [slow(kind, train, "aot_eager") for kind in KINDS for train in (False, True)]
if "mixed" in KINDS:
    COMPILED.append(("mixed", True, "eager"))
SAVED = "mul", "add", "cat", "_to_copy", "_unsafe_view"


def vit(kind, **options):
    """A model with this kind of rotary embeddings alone, in eval mode."""
    if kind == "dinov3":
        options["rope_temperature"] = 100.0
    if kind == "mrope":
        options["rope_mrope_section"] = (2, 3, 3)
    return small_vit(pos_embed="none", rope_type=kind, **options).eval()


batched = partial(running, "stock", rope="batched", component="rope")
SETTINGS = {
    "plain": {},
    "checkpointing": {},
    "autocast": {},
    "patch dropout": {"patch_drop_rate": 0.4},
    "class token": {"class_token": True, "reg_tokens": 2},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_models(kind, setting):
    model = vit(kind, **SETTINGS[setting]).train()
    model.set_grad_checkpointing(setting == "checkpointing")

    def step():
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            return trained(model, BATCH, lambda batch: model(batch).float())

    try:
        want, want_grads = step()
    except RuntimeError as error:
        assert setting == "autocast" and not NEW_TIMM  # 1.0.28 writes float32 tables into bfloat16
        pytest.skip(f"this timm itself cannot: {error}")
    with batched():
        got, grads = step()

    assert relative(got, want) <= 1e-5
    assert worst(grads, want_grads) <= (2e-2 if setting == "autocast" else 1e-4)


def save_some(ctx, operator, *args, **kwargs):
    _, name, *_ = str(operator).split(".")
    return getattr(
        checkpoint.CheckpointPolicy, "MUST_SAVE" if name in SAVED else "PREFER_RECOMPUTE"
    )


@pytest.mark.skipif(OLD_TORCH, reason="this torch has no selective checkpoints")
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("samples", [4, 20], ids=["few tokens", "many tokens"])
def test_selective_checkpoints_give_timms_gradients(kind, samples):
    model = vit(kind)
    batch = {name: value[:samples] for name, value in BATCH.items()}
    contexts = partial(checkpoint.create_selective_checkpoint_contexts, save_some)
    checkpointed = partial(checkpoint.checkpoint, model, use_reentrant=False, context_fn=contexts)
    want = trained(model, batch)
    with batched():
        got = trained(model, batch, checkpointed)
    assert far(got, want) <= 1e-4


@pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler cannot trace it with dynamic shapes")
@pytest.mark.parametrize(("kind", "train", "backend"), COMPILED)
def test_captures_in_one_graph(kind, train, backend):
    model = vit(kind)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)

    def result(run, batch):
        out = run(batch)
        if not (train and kind == "mixed"):
            return out, torch.zeros(0)
        (gradient,) = torch.autograd.grad(out.square().mean(), model.rope.freqs)
        return out.detach(), gradient

    with running(component="rope"), torch.set_grad_enabled(train):
        for batch in (BATCH, vit_batch([(2, 6), (7, 5), (9, 1)] * 8, seed=1)):
            want, want_gradient = result(model, batch)
            got, gradient = result(compiled, batch)
            assert relative(got, want) <= 1e-5
            assert relative(gradient, want_gradient) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how, grad", [pytest.param("export", False, marks=REFUSES), ("trace", False), ("trace", True)]
)
def test_what_is_written_down_holds_for_other_grids(kind, how, grad):
    model = vit(kind, depth=1)
    inputs = tuple(BATCH.values())
    others = tuple(OTHER.values())
    with torch.set_grad_enabled(grad):
        with running(component="rope"):
            program = written(how, model, *inputs)
            want = model(*others)
        assert relative(program(*others), want) <= 1e-5


def replaced(rope, x, coord):
    model = SimpleNamespace(rope=rope, num_prefix_tokens=0)  # all that is asked of a NaFlexVit
    return as_tensor(replacements._generate_rope_naflex(model, x, coord))


@pytest.mark.parametrize("kind", CLASSES)
def test_tracers_and_transforms_meet_plain_operations(kind):
    rope = build(kind)
    coord = BATCH["patch_coord"]
    x = torch.zeros(*coord.shape[:2], 4)
    want = ours(rope, coord)
    of_one = lambda x, coord: replaced(rope, x[None], coord[None])

    with enable():
        by_sample = torch.func.vmap(of_one)(x, coord)
        got = replaced(rope.to("meta"), x.to("meta"), coord.to("meta"))

    assert got.shape == want.shape
    assert got.device.type == "meta"
    assert relative(by_sample, want.movedim(-4, 0).unsqueeze(-4)) <= 1e-5


class OtherRope(timms.RotaryEmbeddingCat):
    """A type that nobody knows."""


UNKNOWN = {
    "type OtherRope": lambda: OtherRope(16, in_pixels=False),
    "'pixel' grid": lambda: timms.RotaryEmbeddingCat(16),
    "for one grid alone": lambda: timms.RotaryEmbeddingCat(16, in_pixels=False, feat_shape=(3, 4)),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_we_do_not_know_stays_with_timm_and_is_said_once(reason, monkeypatch, recwarn):
    model = vit("axial")
    model.rope = UNKNOWN[reason]()
    decide.warned.clear()
    enable()
    method = replacements.VIT, "_generate_rope_naflex"
    monkeypatch.setitem(library.originals, method, lambda *_: "timm's")

    for _ in range(2):
        found = model._generate_rope_naflex(torch.zeros(1, 2, 4), torch.zeros(1, 2, 2))
        assert found == "timm's"

    (warning,) = recwarn
    assert re.search(f"{reason}.* stays with timm's own code", str(warning.message))
    assert [*status().fallbacks.values()] == [2]


@pytest.mark.skipif(not NEW_TIMM, reason="NaFlexVit of older timm has no random coordinates")
def test_random_coordinates_stay_with_timm():
    model = vit("axial", rope_shift_coords=0.3).train()
    decide.warned.clear()

    def draw():
        torch.manual_seed(0)
        return model._generate_rope_naflex(torch.zeros(20, 108, 4), BATCH["patch_coord"])

    message = "at random coordinates stays with timm's own code"
    with enable(), pytest.warns(UserWarning, match=message):
        got = draw()
    assert torch.equal(got, draw())


def test_wrong_inputs_are_named():
    for shape in ((2, 6), (2, 5, 2), (3, 6, 2)):
        with enable(), pytest.raises(ValueError, match=r"patch_coord must hold .* \(2, 6, 2\)"):
            vit("axial")._generate_rope_naflex(torch.zeros(2, 6, 32), torch.zeros(shape))
