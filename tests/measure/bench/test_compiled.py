"""``naflex-fast bench --model NAME --compile``: graphs and breaks, and the times of first and later steps."""

import json
from functools import partial

import pytest
import timm

from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import compiled

pytestmark = pytest.mark.usefixtures("clean")


@ran("matmul")
def test_stock_breaks_and_matmul_is_one_graph_on_the_users_grids(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # TorchInductor would take a minute
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, embed_dim=32, depth=1, num_heads=2))
    file, words = tmp_path / "c.json", "--compile --max-seq-len 16 25 --batch-size 2 --rounds 3 --phase train".split()
    model = ["--model", "naflexvit_base_patch16_gap", "--sizes-from", str(photos)]
    assert cli.main(["bench", *model, *words, "--json", str(file)]) == 0
    stock, ours = json.loads(file.read_text())["rows"]
    assert [row["contender"] for row in (stock, ours)] == ["stock", "matmul"] and ours["suite"] == "compiled"
    counted = ours["about"]["counted"]
    assert counted["matmul"]["breaks"] == 0 and counted["matmul"]["graphs"] <= 2 < counted["stock"]["breaks"]
    assert counted["matmul"]["first steps"] == 6 and ours["rounds"] == 3
    # timm's loop reads height and width of both images, and copies a list for each of their two grids.
    assert (counted["stock"]["eager waits"], counted["matmul"]["eager waits"]) == (6, 1)
    assert 0 < counted["matmul"]["eager operators"] < counted["stock"]["eager operators"]
    text = capsys.readouterr().out
    assert "compiled photos train, B=2" in text and "graphs after the first batch" in text and "eager waits" in text


def test_without_a_model_there_is_nothing_to_compile(capsys):
    assert cli.main(["bench", "--compile"]) == 2
    assert "--compile go with --model NAME" in capsys.readouterr().err
