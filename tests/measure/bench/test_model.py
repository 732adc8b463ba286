"""``naflex-fast bench --model``: whole steps, with the embeddings' share."""

import json
from contextlib import ExitStack
from functools import partial
from itertools import product

import pytest
import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator

import timm_naflex_fast
from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import model as bench_model
from timm_naflex_fast.measure.bench.race import run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates
from timm_naflex_fast.measure.models import load_model

NAME = "naflexvit_base_patch16_gap"


@pytest.fixture
def tiny(monkeypatch):
    """timm's model, but small: one block of 32 channels."""
    monkeypatch.setattr(
        timm, "create_model", partial(timm.create_model, embed_dim=32, depth=1, num_heads=2)
    )
    return load_model(NAME, random_weights=True, num_classes=1000)[0]


def measure(model, *names, batch=1, dtype="float32", phase="infer", rounds=1):
    with ExitStack() as stack:
        return run(
            bench_model.race(model, WORKLOADS["siglip"], batch, dtype, phase, names, stack), rounds
        )


@ran("matmul")
def test_end_to_end(tiny, tmp_path, capsys):
    words, file = (
        f"bench --model {NAME} --batch-size 2 --max-seq-len 16 --rounds 3 --json".split(),
        tmp_path / "m.json",
    )
    assert cli.main([*words, str(file)]) == 0
    text = capsys.readouterr().out
    assert (
        f"B=2, float32, {NAME}, " in text
        and "share of embeddings" in text
        and "bench --model" not in text
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["phase"], row["contender"]) for row in rows] == list(
        product(("train", "infer"), ("stock", "matmul"))
    )
    for row in rows:
        assert (
            0 < row["about"]["embeds_share"][row["contender"]] < 1 and row["about"]["tokens"] <= 32
        )


@ran("matmul")
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_contenders_run_whole_steps_of_one_model_in_turns(tiny, phase):
    forward, seen = tiny.embeds.forward, []
    tiny.embeds.forward = lambda *a, **k: (
        seen.append(timm_naflex_fast.status().models) or forward(*a, **k)
    )
    before = tiny.embeds.pos_embed.detach().clone()
    measure(tiny, "stock", "matmul", batch=2, phase=phase, rounds=2)
    assert {len(models) for models in seen} == {0, 1} and len(
        seen
    ) == 6  # stock runs with nothing patched
    assert all(models[0].pos_embed == "matmul" for models in seen if models)
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert tiny.training is (phase == "train")


def test_the_share_of_the_embeddings_has_their_forward_and_backward(tiny, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(bench_model, "now", lambda: next(ticks))
    (row,) = measure(tiny, "stock", phase="train")
    # Six marks: start, embeddings in and out, their gradient known, end of the backward, end of the
    # step.
    assert next(ticks) == 12 and row["about"]["embeds_share"] == {"stock": 2 / 5}


def test_the_batch_is_what_timms_collator_makes_and_bfloat16_runs_under_autocast(tiny):
    seen, autocast, grids = [], [], WORKLOADS["siglip"].grids(3)
    tiny.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tiny.blocks[0].register_forward_hook(
        lambda *_: autocast.append(torch.is_autocast_enabled("cpu"))
    )
    measure(tiny, "stock", batch=3, dtype="bfloat16")
    coords = [coordinates([grid])[0] for grid in grids]
    own = [(torch.zeros(len(coord), 768), coord, torch.ones(len(coord)).bool()) for coord in coords]
    samples = [(dict(zip(("patches", "patch_coord", "patch_valid"), one)), 0) for one in own]
    want, _ = NaFlexCollator(max_seq_len=max(map(len, coords)))(samples)
    assert autocast == [True, True] and seen[0]["patches"].shape == want["patches"].shape
    for key in ("patch_coord", "patch_valid"):
        assert torch.equal(seen[0][key], want[key]) and seen[0][key].dtype == want[key].dtype


@ran("matmul")
def test_stock_breaks_and_matmul_is_one_graph_on_the_users_grids(
    tiny, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench_model, "BACKEND", "eager")  # TorchInductor would take a minute
    file, words = (
        tmp_path / "c.json",
        "--compile --max-seq-len 16 25 --batch-size 2 --rounds 3 --phase train".split(),
    )
    model = ["--model", NAME, "--sizes-from", str(photos)]
    assert cli.main(["bench", *model, *words, "--json", str(file)]) == 0
    stock, ours = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in (stock, ours)] == ["stock", "matmul"] and ours[
        "suite"
    ] == "compiled"
    counted = ours["about"]["counted"]
    assert (
        counted["matmul"]["breaks"] == 0
        and counted["matmul"]["graphs"] <= 2 < counted["stock"]["breaks"]
    )
    assert counted["matmul"]["first steps"] == 6 and ours["rounds"] == 3
    text = capsys.readouterr().out
    assert "compiled photos train, B=2" in text and "graphs after the first batch" in text
