"""What a timed step of a whole model is."""

from contextlib import ExitStack

import pytest
import torch
from timm.data.naflex_dataset import NaFlexCollator

import timm_naflex_fast
from tests.support.running import ran
from timm_naflex_fast.measure.bench import model as of_model
from timm_naflex_fast.measure.bench.race import run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates
from timm_naflex_fast.measure.models import load_model


@pytest.fixture
def tiny():
    small = dict(embed_dim=32, depth=1, num_heads=2, num_classes=1000)
    return load_model("naflexvit_base_patch16_gap", random_weights=True, **small)[0]


def measure(model, *names, batch=1, dtype="float32", phase="infer", rounds=1):
    steps = of_model.Steps(model, [WORKLOADS["siglip"]], batch, dtype, phase)
    with ExitStack() as stack:
        return run(of_model.eager_race(steps, names, stack), rounds)


@ran("matmul")
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_contenders_run_whole_steps_of_one_model_in_turns(tiny, phase):
    forward = tiny.embeds.forward
    seen = []  # the models with settings of their own, at each forward

    def watched(*args, **kwargs):
        seen.append(timm_naflex_fast.status().models)
        return forward(*args, **kwargs)

    tiny.embeds.forward = watched
    before = tiny.embeds.pos_embed.detach().clone()
    measure(tiny, "stock", "matmul", batch=2, phase=phase, rounds=2)
    assert len(seen) == 6  # a warm-up and two rounds of each
    assert {len(models) for models in seen} == {0, 1}  # stock runs with nothing patched
    assert all(models[0].pos_embed == "matmul" for models in seen if models)
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert tiny.training is (phase == "train")


def test_the_share_of_the_embeddings_has_their_forward_and_backward(tiny, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(of_model, "now", lambda: next(ticks))
    (row,) = measure(tiny, "stock", phase="train")
    # Six marks: start, embeddings in and out, their gradient known, end of the backward, end of the
    # step.
    assert next(ticks) == 12
    assert row["about"]["embeds_share"] == {"stock": 2 / 5}


def test_the_batch_is_what_timms_collator_makes(tiny):
    grids = WORKLOADS["siglip"].grids(3)
    coords = [coordinates([grid])[0] for grid in grids]
    samples = []
    for coord in coords:
        patches = torch.zeros(len(coord), 768)
        valid = torch.ones(len(coord)).bool()
        samples.append((dict(patches=patches, patch_coord=coord, patch_valid=valid), 0))
    want, _ = NaFlexCollator(max_seq_len=max(map(len, coords)))(samples)

    got = of_model.random_batch(tiny, grids)
    assert got["patches"].shape == want["patches"].shape
    for key in ("patch_coord", "patch_valid"):
        assert torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype


def test_bfloat16_runs_under_autocast(tiny):
    autocast = []
    tiny.blocks[0].register_forward_hook(
        lambda *_: autocast.append(torch.is_autocast_enabled("cpu"))
    )
    measure(tiny, "stock", dtype="bfloat16")
    assert autocast == [True, True]
    measure(tiny, "stock", dtype="float32")
    assert autocast == [True, True, False, False]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_compiled_model_meets_each_workload_in_turn_and_no_batch_twice(tiny, rounds):
    workloads = [WORKLOADS["siglip"], WORKLOADS["diverse"]]
    steps = of_model.Steps(tiny, workloads, 2, "float32", "infer")
    batches = of_model._different_batches(steps, rounds)
    got = [(batch["patch_coord"].amax(1) + 1).tolist() for batch in batches]
    want = []
    for number in range(rounds):
        for workload in workloads:
            want.append([list(grid) for grid in workload.grids(4)[2 * number : 2 * number + 2]])
    assert got == want
