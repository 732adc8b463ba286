"""What a timed step of a whole model is."""

import pytest
import torch
from timm.data.naflex_dataset import NaFlexCollator

import timm_naflex_fast
from tests.support.running import ran
from timm_naflex_fast.commands.measure.bench import model as of_model
from timm_naflex_fast.commands.measure.bench.workloads import coordinates, siglip_workload
from timm_naflex_fast.commands.measure.models import load_model

WORKLOAD = siglip_workload(64)


@pytest.fixture
def tiny():
    small = dict(embed_dim=32, depth=1, num_heads=2, num_classes=1000)
    return load_model("naflexvit_base_patch16_gap", random_weights=True, **small)[0]


def measure(model, *names, dtype="float32", phase="infer", rounds=1):
    steps = of_model.Steps(model, [WORKLOAD], 2, dtype, phase)
    return of_model.race_eager(steps, names, rounds)


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
    rows = measure(tiny, "stock", "matmul", phase=phase, rounds=3)
    assert [(row["contender"], row["rounds"]) for row in rows] == [("stock", 3), ("matmul", 3)]
    assert len(seen) == 8  # a warm-up and three rounds of each
    ours = [len(models) for models in seen]  # stock runs with nothing patched
    rounds = [tuple(ours[place : place + 2]) for place in range(0, 8, 2)]
    assert {*rounds} == {(0, 1), (1, 0)}
    assert all(models[0].pos_embed == "matmul" for models in seen if models)
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert tiny.training is (phase == "train")


@ran("matmul")
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_model_that_pools_nothing_is_timed_too(phase):
    small = dict(embed_dim=32, depth=1, num_heads=2, global_pool="")
    model, _ = load_model("naflexvit_base_patch16_gap", random_weights=True, **small)
    rows = measure(model, "stock", "matmul", phase=phase)
    assert [row["contender"] for row in rows] == ["stock", "matmul"]


def test_the_batch_is_what_timms_collator_makes(tiny):
    grids = WORKLOAD.grids(3)
    coords = [coordinates([grid])[0] for grid in grids]
    samples = []
    for coord in coords:
        patches = torch.zeros(len(coord), 768)
        valid = torch.ones(len(coord)).bool()
        samples.append((dict(patches=patches, patch_coord=coord, patch_valid=valid), 0))
    want, _ = NaFlexCollator(max_seq_len=64)(samples)

    got = of_model.random_batch(tiny, grids, 64)
    assert got["patches"].shape == want["patches"].shape
    for key in ("patch_coord", "patch_valid"):
        assert torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype


def test_bfloat16_runs_under_autocast(tiny):
    autocast = []
    tiny.blocks[0].register_forward_hook(
        lambda *_: autocast.append(torch.is_autocast_enabled("cpu"))
    )
    measure(tiny, "stock", dtype="bfloat16")
    measure(tiny, "stock", dtype="float32")
    assert autocast == [True, True, False, False]


def test_a_compiled_model_meets_each_workload_in_turn_and_no_batch_twice(tiny):
    workloads = [WORKLOAD, siglip_workload(16)]
    steps = of_model.Steps(tiny, workloads, 2, "float32", "infer")
    batches = of_model._different_batches(steps, 2)
    got = [(batch["patch_coord"].amax(1) + 1).tolist() for batch in batches]
    long, short = ([[*grid] for grid in workload.grids(4)] for workload in workloads)
    assert got == [long[:2], short[:2], long[2:], short[2:]]
