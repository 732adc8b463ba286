"""``naflex-fast bench --model``: whole steps, with the embeddings' share."""

import pytest
import torch
from oracles import is_pristine

import timm_naflex_fast
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import model as bench_model
from timm_naflex_fast.measure.bench import report
from timm_naflex_fast.measure.bench.race import run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS
from timm_naflex_fast.measure.models import load_model

NAME = "naflexvit_base_patch16_gap"


@pytest.fixture
def tiny(monkeypatch):
    """timm's model, but small: one block of 32 channels."""
    import timm

    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: create(*a, **k, embed_dim=32, depth=1, num_heads=2))
    return load_model(NAME, random_weights=True, num_classes=bench_model.CLASSES)[0]


@pytest.mark.ran("matmul")
def test_end_to_end(tiny, tmp_path, capsys):
    options = ["--model", NAME, "--batch", "2", "--seq-len", "16", "--rounds", "3", "--json", str(tmp_path / "m.json")]
    assert cli.main(["bench", *options]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(
        f"On this machine, for {NAME} with 2 images (siglip-16, float32), `matmul` "
    )
    assert "share of embeddings" in text
    rows, _ = report.read_json(tmp_path / "m.json")
    assert [(row.phase, row.contender) for row in rows] == [
        ("infer", "stock"), ("infer", "matmul"), ("train", "stock"), ("train", "matmul"),
    ]  # fmt: skip
    for row in rows:
        assert 0 < row.about["embeds_share"][row.contender] < 1 and row.about["tokens"] <= 32
    assert is_pristine()


@pytest.mark.ran("matmul")
def test_on_a_folders_sizes(tiny, photos, capsys):
    options = ["--sizes-from", str(photos), "--seq-len", "16", "--batch", "3", "--rounds", "1", "--phase", "infer"]
    assert cli.main(["bench", "--model", NAME, *options]) == 0
    assert "(photos, float32)" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.ran("matmul")
@pytest.mark.parametrize("phase", bench_model.PHASES)
def test_contenders_run_whole_steps_of_one_model_in_turns(tiny, phase):
    made = bench_model.races(tiny, NAME, [WORKLOADS["siglip"]], [2], phases=[phase])
    race, seen = next(made), []
    forward = tiny.embeds.forward
    tiny.embeds.forward = lambda *a, **k: seen.append(timm_naflex_fast.status().models) or forward(*a, **k)
    before = tiny.embeds.pos_embed.detach().clone()
    rows = run(race, 2)
    assert {len(models) for models in seen} == {0, 1} and len(seen) == 6  # stock runs with nothing patched
    assert all(models[0].pos_embed == "matmul" for models in seen if models)
    assert torch.equal(tiny.embeds.pos_embed, before) is (phase == "infer")  # AdamW stepped
    assert [row.ours for row in rows] == [False, True] and tiny.training is (phase == "train")
    assert next(made, None) is None and is_pristine()


def test_the_share_of_the_embeddings_has_their_forward_and_backward(tiny, monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(bench_model, "mark", lambda device: next(ticks))
    race = next(
        made := bench_model.races(tiny, NAME, [WORKLOADS["siglip"]], [1], phases=["train"], contenders=["stock"])
    )
    (row,) = run(race, 1)
    # Six marks: start, embeddings in and out, their gradient known, end of the backward, end of the step.
    assert next(ticks) == 12 and row.about["embeds_share"] == {"stock": 2 / 5}
    made.close()


def test_bfloat16_runs_under_autocast(tiny):
    made = bench_model.races(tiny, NAME, [WORKLOADS["siglip"]], [1], ["bfloat16"], ["infer"], ["stock"])
    race, seen = next(made), []
    tiny.blocks[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    run(race, 1)
    assert seen == [True, True]
    made.close()
