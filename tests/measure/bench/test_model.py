"""``naflex-fast bench --model``: whole steps, with the embeddings' share."""

import json
from contextlib import ExitStack

import pytest
import torch

import timm_naflex_fast
from tests.support.oracles import is_pristine
from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import model as bench_model
from timm_naflex_fast.measure.bench.race import run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates
from timm_naflex_fast.measure.models import load_model

NAME = "naflexvit_base_patch16_gap"


@pytest.fixture
def tiny(monkeypatch):
    """timm's model, but small: one block of 32 channels; timed once, however noisy the machine is."""
    monkeypatch.setattr("timm_naflex_fast.measure.bench.race.DISTURBED", float("inf"))
    import timm

    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: create(*a, **k, embed_dim=32, depth=1, num_heads=2))
    return load_model(NAME, random_weights=True, num_classes=1000)[0]


def measure(model, *names, batch=1, dtype="float32", phase="infer", rounds=1):
    with ExitStack() as on:
        return run(bench_model.race(model, WORKLOADS["siglip"], batch, dtype, phase, names, on), rounds)


@ran("matmul")
def test_end_to_end(tiny, tmp_path, capsys):
    options = ["--model", NAME, "--batch", "2", "--max-seq-len", "16", "--rounds", "3"]
    options += ["--json", str(tmp_path / "m.json")]
    assert cli.main(["bench", *options]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(
        f"On this machine, for {NAME} with 2 images (siglip-16, float32), `matmul` "
    )
    assert "share of embeddings" in text
    rows = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert [(row["phase"], row["contender"]) for row in rows] == [
        ("train", "stock"), ("train", "matmul"), ("infer", "stock"), ("infer", "matmul"),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["about"]["embeds_share"][row["contender"]] < 1 and row["about"]["tokens"] <= 32
    assert is_pristine()


@ran("matmul")
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_contenders_run_whole_steps_of_one_model_in_turns(tiny, phase):
    forward, seen = tiny.embeds.forward, []
    tiny.embeds.forward = lambda *a, **k: seen.append(timm_naflex_fast.status().models) or forward(*a, **k)
    before = tiny.embeds.pos_embed.detach().clone()
    measure(tiny, "stock", "matmul", batch=2, phase=phase, rounds=2)
    assert {len(models) for models in seen} == {0, 1} and len(seen) == 6  # stock runs with nothing patched
    assert all(models[0].pos_embed == "matmul" for models in seen if models)
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert tiny.training is (phase == "train")
    assert is_pristine()


def test_the_share_of_the_embeddings_has_their_forward_and_backward(tiny, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(bench_model, "mark", lambda device: next(ticks))
    (row,) = measure(tiny, "stock", phase="train")
    # Six marks: start, embeddings in and out, their gradient known, end of the backward, end of the step.
    assert next(ticks) == 12 and row.about["embeds_share"] == {"stock": 2 / 5}


def test_bfloat16_runs_under_autocast(tiny):
    seen = []
    tiny.blocks[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    measure(tiny, "stock", dtype="bfloat16")
    assert seen == [True, True]


def test_the_batch_is_what_timms_collator_makes(tiny):
    from timm.data.naflex_dataset import NaFlexCollator

    seen, grids = [], WORKLOADS["siglip"].grids(3)
    tiny.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    measure(tiny, "stock", batch=3)
    names, samples = ("patches", "patch_coord", "patch_valid"), []
    for h, w in grids:
        values = (torch.zeros(h * w, 768), coordinates([(h, w)])[0], torch.ones(h * w).bool())
        samples.append((dict(zip(names, values)), 0))
    want, _ = NaFlexCollator(max_seq_len=max(h * w for h, w in grids))(samples)
    assert seen[0]["patches"].shape == want["patches"].shape
    for key in ("patch_coord", "patch_valid"):
        assert torch.equal(seen[0][key], want[key]) and seen[0][key].dtype == want[key].dtype
