"""``naflex-fast bench`` from end to end, on a small model."""

import json
from functools import partial
from unittest.mock import Mock

import pytest
import timm

from tests.support.measured import row
from tests.support.running import ran
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.bench import model as of_model

NAME = "naflexvit_base_patch16_gap"
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def tiny(monkeypatch):
    """timm's models, but small: one block of 32 channels."""
    small = partial(timm.create_model, embed_dim=32, depth=1, num_heads=2)
    monkeypatch.setattr(timm, "create_model", small)


def bench(words, *more):
    return cli.main(["bench", "--model", NAME, *words.split(), *map(str, more)])


@ran("matmul")
def test_each_combination_is_a_race_in_the_table_and_in_the_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert bench("--batch-size 2 --max-seq-len 16 9 --rounds 3 --json", file) == 0

    out, err = capsys.readouterr()
    assert err.startswith(f"loading {NAME} ...\n")
    titles = [line for line in out.splitlines() if line.startswith("model ")]
    about = f"B=2, float32, {NAME}, cpu"
    assert titles == [
        f"model siglip-16 train, {about}",
        f"model siglip-16 infer, {about}",
        f"model siglip-9 train, {about}",
        f"model siglip-9 infer, {about}",
    ]
    assert "times faster than stock" in out
    record = json.loads(file.read_text())
    assert record["command"].endswith(f"--json {file}")
    assert [one["contender"] for one in record["rows"]] == ["stock", "matmul"] * 4
    assert all(set(one) == set(row()) for one in record["rows"])


@ran("matmul")
def test_json_on_stdout_is_one_object(capsys):
    assert bench("--batch-size 1 --max-seq-len 9 16 --phase infer --rounds 1 --json -") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 4  # two contenders at each length


@ran("grid_sample")
def test_the_grids_are_those_of_a_folder(photos, capsys):
    (photos / "bad.png").write_text("no")
    options = "--batch-size 2 --max-seq-len 16 --phase infer --modes grid_sample --rounds 1"
    assert bench(f"{options} --sizes-from", photos) == 0
    out, err = capsys.readouterr()
    assert err.startswith("skipped, not readable as images: 1 (bad.png: ")
    assert out.startswith("model photos-16 infer, B=2, float32, ")


@ran("matmul")
def test_stock_breaks_and_matmul_is_one_graph_on_the_users_grids(
    photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(of_model, "BACKEND", "eager")  # TorchInductor would take a minute
    file = tmp_path / "compiled.json"
    options = "--compile --max-seq-len 16 25 --batch-size 2 --rounds 1 --phase train --sizes-from"
    assert bench(options, photos, "--json", file) == 0

    out = capsys.readouterr().out
    assert (
        "compiled photos-16 photos-25 train, B=2" in out and "graphs after the first batch" in out
    )
    rows = json.loads(file.read_text())["rows"]
    assert [one["contender"] for one in rows] == ["stock", "matmul"]
    assert {one["suite"] for one in rows} == {"compiled"} and rows[1]["rounds"] == 1
    stock, ours = (rows[0]["about"]["counted"][name] for name in ("stock", "matmul"))
    assert ours["breaks"] == 0 and ours["graphs"] <= 2 < stock["breaks"]
    assert ours["first steps"] == 2  # one of each length


def test_ctrl_c_is_one_line_and_keeps_the_races_that_ended(tmp_path, monkeypatch, capsys):
    file = tmp_path / "figures.json"
    ended = [row(phase="train")]
    monkeypatch.setattr(of_model, "race_eager", Mock(side_effect=[ended, KeyboardInterrupt]))
    assert bench("--json", file) == 130
    assert [one["phase"] for one in json.loads(file.read_text())["rows"]] == ["train"]
    assert capsys.readouterr().err.splitlines()[-1] == "naflex-fast bench: interrupted"
