"""``naflex-fast bench`` from end to end."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.support.measured import row
from tests.support.oracles import is_pristine
from tests.support.running import ran
from timm_naflex_fast.backends import dispatch
from timm_naflex_fast.cli import bench as command
from timm_naflex_fast.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments):
    return cli.main(["bench", "--channels", "4", "--rounds", "1", *arguments])


@ran("matmul")
def test_command_line_end_to_end(tmp_path, capsys):
    out = tmp_path / "figures.json"
    command = ["--workload", "siglip", "--batch", "2", "1", "--contenders", "stock", "matmul", "plain-add"]
    assert bench(*command, "--phase", "infer", "train", "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert text.index("siglip infer, B=1") < text.index("siglip infer, B=2") < text.index("siglip train, B=1")
    record = json.loads(out.read_text())
    assert record["command"].endswith(f"--json {out}") and len(record["rows"]) == 12
    assert set(record["rows"][0]) == set(asdict(row()))
    assert {one["contender"] for one in record["rows"]} == {"stock", "matmul", "plain-add"}
    assert record["torch"] == torch.__version__ and "CPU cores" in record["machine"]
    assert is_pristine()


def test_an_unwritable_file_is_noticed_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_races", lambda *_: pytest.fail("it measured"))
    for path in (tmp_path / "missing" / "a.json", tmp_path):
        assert bench("--json", str(path)) == 2
        err = capsys.readouterr().err
        assert str(path) in err and err.count("\n") == 1


@ran("matmul")
def test_command_line_on_a_folder(photos, capsys):
    (photos / "bad.png").write_text("no")
    assert bench("--sizes-from", str(photos), "--batch", "2", "--max-seq-len", "16", "--phase", "train") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not read: bad.png: ") and lines[1].startswith("4 images, ")
    assert lines[3].startswith("pos_embed photos train, B=2, float32, 16x16 bilinear, ") and lines[4].startswith(
        "contender"
    )


def test_strategies_are_on_while_they_are_timed(monkeypatch, capsys):
    seen, add = [], dispatch.add
    monkeypatch.setattr(dispatch, "add", lambda x, *rest: seen.append(len(x)) or add(x, *rest))
    options = ["--workload", "siglip", "diverse", "--batch", "2", "1", "--phase", "infer", "--contenders", "matmul"]
    assert bench(*options) == 0
    text = capsys.readouterr().out
    assert text.index("siglip infer, B=2") < text.index("diverse infer, B=1") < text.index("diverse infer, B=2")
    assert seen == [1, 1, 2, 2] * 2  # one warm-up and one round each
    assert is_pristine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes-from", "/nope"], "/nope is not a folder"),
        (["--model", "resnet18"], "timm has no NaFlexVit 'resnet18'; valid: naflexvit_base_patch16_gap"),
        (
            ["--model", "m", "--contenders", "plain-add"],
            "plain-add cannot be timed in a whole model; valid: train infer",
        ),
        (["--model", "m", "--phase", "frozen"], "frozen cannot be timed in a whole model; valid: train infer stock"),
        (["--max-seq-len", "4", "--workload", "siglip"], "leave out --workload"),
    ],
)
def test_command_line_errors_are_one_line_and_come_first(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("naflex-fast bench: ") and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--workload", "nope"], ["--workload: invalid choice: 'nope'", "single", "radio"]),
        (["--phase", "nope"], ["--phase: invalid choice: 'nope'", "infer", "frozen", "train"]),
        (["--dtype", "float8"], ["--dtype: invalid choice: 'float8'", "float32", "bfloat16", "float16"]),
        (["--contenders", "nope"], ["--contenders: invalid choice: 'nope'", "stock", "hf-siglip2", "plain-add"]),
        (["--device", "tpu"], ["--device: invalid choice: 'tpu'", "cpu", "cuda"]),
        (["--batch", "0"], ["--batch: invalid positive value: '0'"]),
        (["--budget", "-1"], ["--budget: invalid seconds value: '-1'"]),
        (["--json", ""], ["--json: an empty path"]),
        (["--rounds", "0"], ["--rounds: invalid positive value: '0'"]),
        (["--sizes-from", ".", "--workload", "siglip"], ["--workload: not allowed with argument --sizes-from"]),
    ],
)
def test_wrong_values_name_the_valid_ones(arguments, messages, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and all(message in err.splitlines()[-1] for message in messages)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


@ran("matmul")
def test_ctrl_c_is_one_line_and_keeps_the_races_that_ended(tmp_path, monkeypatch, capsys):
    from timm_naflex_fast.measure.bench import race

    time, out = race.run, tmp_path / "figures.json"

    def stopped(one, *more, **options):
        if one.batch == 2:
            raise KeyboardInterrupt
        return time(one, *more, **options)

    monkeypatch.setattr(race, "run", stopped)
    options = ["--workload", "siglip", "--batch", "1", "2", "--contenders", "matmul", "--phase", "infer"]
    assert bench(*options, "--json", str(out)) == 130
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1]
    assert capsys.readouterr().err.splitlines()[-1] == "naflex-fast bench: interrupted"
    assert is_pristine()


def test_a_frozen_table_that_seems_slower_than_a_changing_one_is_timed_again(monkeypatch, capsys):
    from timm_naflex_fast.measure.bench import race

    times = iter([10.0, 400.0, 9.0])
    monkeypatch.setattr(race, "run", lambda *_, **__: [row(median_ms=next(times))])
    assert bench("--workload", "siglip", "--contenders", "matmul", "--phase", "infer", "frozen") == 0
    assert "400" not in capsys.readouterr().out and next(times, None) is None
