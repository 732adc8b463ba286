"""``naflex-fast bench`` from end to end."""

import json
from unittest.mock import Mock

from tests.support.measured import row
from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import race


def bench(words, *more):
    return cli.main(["bench", "--channels", "4", "--rounds", "1", *words.split(), *map(str, more)])


@ran("matmul")
def test_command_line_end_to_end(tmp_path, capsys):
    out = tmp_path / "figures.json"
    command = "--workload siglip --batch-size 2 1 --contenders stock matmul plain-add --phase infer train --json"
    assert bench(command, out) == 0
    text = capsys.readouterr().out
    assert "bench --model NAME times a whole one" in text
    assert (
        text.index("siglip infer, B=1")
        < text.index("siglip infer, B=2")
        < text.index("siglip train, B=1")
    )
    record = json.loads(out.read_text())
    assert record["command"].endswith(f"--json {out}") and set(record["rows"][0]) == set(row())
    assert [one["contender"] for one in record["rows"]] == ["stock", "matmul", "plain-add"] * 4


@ran("matmul")
def test_command_line_on_a_folder(photos, capsys):
    (photos / "bad.png").write_text("no")
    assert (
        bench(
            "--batch-size 2 --max-seq-len 16 --phase train --contenders matmul --sizes-from", photos
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not read: bad.png: ") and lines[1].startswith("4 images, ")
    assert lines[3].startswith("pos_embed photos train, B=2, float32, 16x16 bilinear, ")


def test_ctrl_c_is_one_line_and_keeps_the_races_that_ended(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    monkeypatch.setattr(race, "run", Mock(side_effect=[[row(batch=1)], KeyboardInterrupt]))
    assert (
        bench("--workload siglip --batch-size 1 2 --contenders matmul --phase infer --json", out)
        == 130
    )
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1]
    assert capsys.readouterr().err.splitlines()[-1] == "naflex-fast bench: interrupted"


@ran("matmul")
def test_figures_that_cannot_be_written_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "timm_naflex_fast.cli.bench.write_json", Mock(side_effect=OSError("the disk is full"))
    )
    out = tmp_path / "figures.json"
    assert (
        bench("--workload siglip --batch-size 1 --contenders matmul --phase infer --json", out) == 2
    )
    found = capsys.readouterr()
    assert (
        "siglip infer, B=1" in found.out
        and "median ms" in found.out
        and "the disk is full" in found.err
    )
