"""``naflex-fast bench`` from end to end, on a small model."""

import json
from functools import partial
from unittest.mock import Mock

import pytest
import timm
import torch

from tests.support.checks import slow
from tests.support.json_page import named
from tests.support.running import ran
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure import racing
from timm_naflex_fast.commands.measure.bench import model as of_model

NAME = "naflexvit_base_patch16_gap"
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def tiny(monkeypatch):
    """timm's models, but small: one block of 32 channels. And two rounds."""
    small = partial(timm.create_model, embed_dim=32, depth=1, num_heads=2)
    monkeypatch.setattr(timm, "create_model", small)
    monkeypatch.setattr(of_model, "ROUNDS", 2)


def bench(words, *more):
    return cli.main(["bench", "--model", NAME, *words.split(), *map(str, more)])


@ran("matmul")
def test_each_combination_is_a_race_in_the_table_and_in_the_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert bench("--batch-size 2 --max-seq-len 16 9 --json", file) == 0

    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("siglip-")]
    races = ("siglip-16 train", "siglip-16 infer", "siglip-9 train", "siglip-9 infer")
    assert titles == [f"{race}, B=2, float32, {NAME}, cpu" for race in races]
    record = json.loads(file.read_text())
    assert record["command"].endswith(f"--json {file}")
    assert {"commit", "date", "machine", "python", "torch", "timm"} < {*record}
    assert [one["contender"] for one in record["rows"]] == ["stock", "matmul"] * 4
    for stock, ours in zip(record["rows"][::2], record["rows"][1::2]):
        assert ours["times_faster"] == stock["median_ms"] / ours["median_ms"]


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_stock_breaks_and_matmul_is_one_graph_and_the_page_names_every_field(
    processes, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(of_model, "BACKEND", "eager")  # TorchInductor would take a minute
    monkeypatch.setattr(racing, "PROCESSES", processes)
    file = tmp_path / "compiled.json"
    options = "--compile --max-seq-len 16 25 --batch-size 2 --phase infer --model-kwargs "
    options += "embed_dim=32 depth=1 num_heads=2"  # the processes are not patched
    assert bench(options, "--json", file) == 0

    out = capsys.readouterr().out
    assert "siglip-16 siglip-25 infer, B=2" in out and "graphs after the first batch" in out
    record = json.loads(file.read_text())
    stock, ours = record["rows"]
    assert (stock["contender"], ours["contender"]) == ("stock", "matmul")
    assert ours["breaks"] == 0 and ours["graphs"] <= 2 < stock["breaks"]
    assert ours["first steps"] == 20  # ten of each length
    assert ours["processes"] == processes
    assert ours["lowest_ms"] <= ours["median_ms"] <= ours["highest_ms"]
    assert (ours["lowest_ms"] < ours["highest_ms"]) == (processes > 1)
    assert {*record} - named("Where figures come from") == {"rows"}
    quartiles = {"first_quartile_ms", "third_quartile_ms", "rounds"}
    assert {"rows", *ours} | quartiles == named("bench") - {"stock", "--compile"}


def test_without_a_gpu_cuda_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("--device cuda") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("naflex-fast bench: --device cuda: torch sees no GPU")


def test_ctrl_c_is_one_line_and_keeps_the_races_that_ended(tmp_path, monkeypatch, capsys):
    file = tmp_path / "figures.json"
    ended = {"matmul": {"median_ms": 10.0}}
    monkeypatch.setattr(of_model, "race_eager", Mock(side_effect=[ended, KeyboardInterrupt]))
    assert bench("--json", file) == 130
    assert [one["phase"] for one in json.loads(file.read_text())["rows"]] == ["train"]
    assert capsys.readouterr().err.splitlines()[-1] == "naflex-fast bench: interrupted"
