"""Rotary embeddings inside whole models, in graphs, and as a flag."""

from functools import partial

import pytest
import timm.layers.pos_embed_sincos as timms
import torch

from tests.support.checks import slow, written
from tests.support.oracles import OLD_TORCH, relative, small_vit, trained, vit_batch, worst
from tests.support.rotary import CLASSES, FIELDS, NEW_TIMM, as_tensor
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.rope.modules import read_rope

KINDS = [kind for kind in CLASSES if kind != "dinov3" or "rope_rotate_half" in FIELDS]
# What timm itself can run as a whole model.
RUNS = [kind for kind in KINDS if kind != "mixed" or NEW_TIMM]
BATCH = vit_batch([(3, 4), (12, 9), (3, 4), (8, 8), (4, 9)] * 4)
OTHER = vit_batch([(12, 9), (2, 2), (5, 6), (1, 9), (10, 10)] * 4, seed=2)
REFUSES = pytest.mark.skipif(OLD_TORCH, reason="this torch's export refuses writing in place")


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


@pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler cannot trace it with dynamic shapes")
@pytest.mark.parametrize(
    ("kind", "backend"), [("mixed", "eager"), *(slow(kind, "aot_eager") for kind in KINDS)]
)
def test_trains_in_one_graph(kind, backend):
    model = vit(kind)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with running(component="rope"):
        for batch in (BATCH, vit_batch([(2, 6), (7, 5), (9, 1)] * 8, seed=1)):
            want, want_grads = trained(model, batch)
            got, grads = trained(model, batch, compiled)
            assert relative(got, want) <= 1e-5
            assert worst(grads, want_grads) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [pytest.param("export", marks=REFUSES), "trace"])
def test_what_is_written_down_holds_for_other_grids(kind, how):
    model = vit(kind, depth=1)
    others = tuple(OTHER.values())
    with torch.set_grad_enabled(how == "trace"):
        with running(component="rope"):
            program = written(how, model, *BATCH.values())
            want = model(*others)
        assert relative(program(*others), want) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_tracers_and_transforms_meet_plain_operations(kind):
    model = vit(kind)
    coord = BATCH["patch_coord"]
    x = torch.zeros(*coord.shape[:2], 4)

    def embed(x, coord):
        return as_tensor(model._generate_rope_naflex(x, coord))

    with enable():
        want = embed(x, coord)
        by_sample = torch.func.vmap(lambda x, coord: embed(x[None], coord[None]))(x, coord)
        model.to("meta")
        got = embed(x.to("meta"), coord.to("meta"))

    assert got.shape == want.shape
    assert got.device.type == "meta"
    assert relative(by_sample, want.movedim(-4, 0).unsqueeze(-4)) <= 1e-5


class OtherRope(timms.RotaryEmbeddingCat):
    """A type that nobody knows."""


NAMESAKE = type("RotaryEmbeddingCat", (timms.RotaryEmbeddingCat,), {})  # but not timm's


def test_what_we_do_not_know_is_named():
    made = timms.RotaryEmbeddingCat
    for rope, reason in (
        (OtherRope(16, in_pixels=False), "type OtherRope"),
        (NAMESAKE(16, in_pixels=False), "type RotaryEmbeddingCat"),
        (made(16), "'pixel' grid"),
        (made(16, in_pixels=False, feat_shape=(3, 4)), "for one grid alone"),
    ):
        assert reason in read_rope(rope)


SKIPPED = (
    "get_batch_embeds",
    "get_embed",
    "_build_embed_cat",
    "_build_embed",
    "_create_embed",
    "_get_pos_embed_from_coords",
)


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("name", SKIPPED)
def test_timm_runs_where_somebody_changed_a_method_that_ours_skips(name):
    models = [vit(kind) for kind in RUNS]
    models = [model for model in models if hasattr(model.rope, name)]
    if not models:
        pytest.skip("this timm has no such method")
    for model in models:
        old = getattr(model.rope, name)
        vars(model.rope)[name] = lambda *args, old=old, **options: old(*args, **options)
        with enable("stock", rope="batched"):
            model(BATCH)
            changed = f"{type(model.rope).__name__}.{name} (not the library's own)"
            assert status().fallbacks == {changed: 1}


@pytest.mark.skipif(not NEW_TIMM, reason="NaFlexVit of older timm has no random coordinates")
def test_random_coordinates_stay_with_timm():
    model = vit("axial", rope_shift_coords=0.3).train()

    def draw():
        torch.manual_seed(0)
        return model._generate_rope_naflex(torch.zeros(20, 108, 4), BATCH["patch_coord"])

    message = "at random coordinates stays with timm's own code"
    with enable(), pytest.warns(UserWarning, match=message):
        got = draw()
    assert torch.equal(got, draw())
