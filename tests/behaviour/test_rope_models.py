"""Rotary tables inside whole models, in graphs, and as a flag."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import timm.layers.pos_embed_sincos as timms
import torch
from torch.utils import checkpoint

from tests.support.checks import written
from tests.support.oracles import OLD_TORCH, far, relative, small_vit, trained, vit_batch, worst
from tests.support.rotary import CLASSES, FIELDS, NEW_TIMM, as_tensor, build, ours
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching import decide, library
from timm_naflex_fast.patching import timm as replacements

KINDS = [kind for kind in CLASSES if kind != "dinov3" or "rope_rotate_half" in FIELDS]
RUNS = [
    kind for kind in KINDS if kind != "mixed" or NEW_TIMM
]  # what timm itself can run as a whole model
BATCH = vit_batch([(3, 4), (12, 9), (3, 4), (8, 8), (4, 9)] * 4)
OTHER = vit_batch([(12, 9), (2, 2), (5, 6), (1, 9), (10, 10)] * 4, seed=2)
REFUSES = pytest.mark.skipif(OLD_TORCH, reason="this torch's export refuses writing in place")
AXIAL, FRACTION = timms.RotaryEmbeddingCat, dict(in_pixels=False)
UNKNOWN = {
    "type OtherRope": (type("OtherRope", (AXIAL,), {}), FRACTION),
    "'pixel' grid": (AXIAL, {}),
}
UNKNOWN["for one grid alone"] = AXIAL, dict(feat_shape=(3, 4)) | FRACTION
SAVED = "mul add cat _to_copy _unsafe_view".split()


def vit(kind, **extra):
    """A model with this kind of rotary embeddings alone, in eval mode."""
    options = {
        "dinov3": dict(rope_temperature=100.0),
        "mrope": dict(rope_mrope_section=(2, 3, 3)),
    }.get(kind, {})
    return small_vit(pos_embed="none", rope_type=kind, **options, **extra).eval()


def save_some(ctx, operator, *args, **kwargs):
    return checkpoint.CheckpointPolicy[
        "MUST_SAVE" if str(operator).split(".")[1] in SAVED else "PREFER_RECOMPUTE"
    ]


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    "extra", ["plain", "patch dropout", "checkpointing", "class token", "autocast"]
)
def test_whole_models(kind, extra):
    options = {
        "patch dropout": dict(patch_drop_rate=0.4),
        "class token": dict(class_token=True, reg_tokens=2),
    }
    model = vit(kind, **options.get(extra, {})).train()
    model.set_grad_checkpointing(extra == "checkpointing")

    def step():
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=extra == "autocast"):
            return trained(model, BATCH, lambda batch: model(batch).float())

    try:
        want, want_grads = step()
    except RuntimeError as error:
        assert extra == "autocast" and not NEW_TIMM  # 1.0.28 writes float32 tables into bfloat16
        pytest.skip(f"this timm itself cannot: {error}")
    with running("stock", rope="batched", component="rope"):
        got, grads = step()
    assert relative(got, want) <= 1e-5
    assert worst(grads, want_grads) <= (2e-2 if extra == "autocast" else 1e-4)


@pytest.mark.skipif(OLD_TORCH, reason="this torch has no selective checkpoints")
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("samples", [4, 20], ids=["few tokens", "many tokens"])
def test_selective_checkpoints_give_timms_gradients(kind, samples):
    model, batch = vit(kind), {name: value[:samples] for name, value in BATCH.items()}
    contexts, want = (
        partial(checkpoint.create_selective_checkpoint_contexts, save_some),
        trained(model, batch),
    )
    with running("stock", rope="batched", component="rope"):
        got = trained(
            model,
            batch,
            partial(checkpoint.checkpoint, model, use_reentrant=False, context_fn=contexts),
        )
    assert far(got, want) <= 1e-4


@pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler cannot trace it with dynamic shapes")
@pytest.mark.parametrize(
    ("kind", "train", "backend"),
    [("mixed", True, "eager")] * ("mixed" in KINDS)
    + [
        pytest.param(kind, train, "aot_eager", marks=pytest.mark.slow)
        for kind in KINDS
        for train in (False, True)
    ],
)
def test_captures_in_one_graph(kind, train, backend):
    model = vit(kind)
    with running(component="rope"), torch.set_grad_enabled(train):
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for batch in (
            BATCH,
            vit_batch([(2, 6), (7, 5), (9, 1)] * 8, seed=1),
        ):  # the second needs no host reads either
            want, got = model(batch), compiled(batch)
            assert relative(got, want) <= 1e-5
            if train and kind == "mixed":
                grads = [
                    torch.autograd.grad(out.square().mean(), model.rope.freqs)[0]
                    for out in (want, got)
                ]
                assert relative(grads[1], grads[0]) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how, grad", [pytest.param("export", False, marks=REFUSES), ("trace", False), ("trace", True)]
)
def test_what_is_written_down_holds_for_other_grids(kind, how, grad):
    model, inputs = vit(kind, depth=1), tuple(BATCH.values())
    with torch.set_grad_enabled(grad):
        with running(component="rope"):
            program, want = written(how, model, *inputs), model(*OTHER.values())
        assert relative(program(*OTHER.values()), want) <= 1e-5


@pytest.mark.parametrize("kind", CLASSES)
def test_tracers_and_transforms_meet_plain_operations(kind):
    rope, coord = build(kind), BATCH["patch_coord"]
    x, want = torch.zeros(*coord.shape[:2], 4), ours(rope, coord)

    def replacement(rope, x, coord):
        model = SimpleNamespace(rope=rope, num_prefix_tokens=0)  # all that is asked of a NaFlexVit
        return as_tensor(replacements._generate_rope_naflex(model, x, coord))

    with enable():
        by_sample = torch.func.vmap(lambda x, c: replacement(rope, x[None], c[None]))(x, coord)
        got = replacement(rope.to("meta"), x.to("meta"), coord.to("meta"))
        assert got.shape == want.shape and got.device.type == "meta"
    assert relative(by_sample, want.movedim(-4, 0).unsqueeze(-4)) <= 1e-5


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_we_do_not_know_stays_with_timm_and_is_said_once(reason, monkeypatch, recwarn):
    model, (rope, options) = vit("axial"), UNKNOWN[reason]
    model.rope = rope(16, **options)
    decide.warned.clear()
    enable()
    monkeypatch.setitem(
        library.originals, (replacements.VIT, "_generate_rope_naflex"), lambda *_: "timm's"
    )
    for _ in range(2):
        assert model._generate_rope_naflex(torch.zeros(1, 2, 4), torch.zeros(1, 2, 2)) == "timm's"
    assert len(recwarn) == 1 and re.search(
        f"{reason}.* stays with timm's own code", str(recwarn[0].message)
    )
    assert [*status().fallbacks.values()] == [2]


@pytest.mark.skipif(not NEW_TIMM, reason="NaFlexVit of older timm has no random coordinates")
def test_random_coordinates_while_tracing_stay_with_timm(monkeypatch):
    model = vit("axial", rope_shift_coords=0.3).train()
    decide.warned.clear()
    monkeypatch.setattr(replacements, "context_of", lambda *_: "export")

    def draw():
        torch.manual_seed(0)
        return model._generate_rope_naflex(torch.zeros(20, 108, 4), BATCH["patch_coord"])

    with (
        enable(),
        pytest.warns(UserWarning, match="coordinates where operations are traced stays with"),
    ):
        got = draw()
    assert torch.equal(got, draw())


def test_wrong_inputs_are_named():
    for coord in (torch.zeros(2, 6), torch.zeros(2, 5, 2), torch.zeros(3, 6, 2)):
        with enable(), pytest.raises(ValueError, match=r"patch_coord must hold .* \(2, 6, 2\)"):
            vit("axial")._generate_rope_naflex(torch.zeros(2, 6, 32), coord)
