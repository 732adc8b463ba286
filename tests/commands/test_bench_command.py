"""``naflex-fast bench`` from end to end."""

import json
import re
import sys
from dataclasses import asdict
from types import ModuleType

import pytest
import torch
from oracles import is_pristine
from test_bench import Clock, row

from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import command, report
from timm_naflex_fast.measure.bench.race import Race
from timm_naflex_fast.resampling import exact as matmul


def bench(*arguments):
    return cli.main(["bench", "--channels", "4", "--rounds", "1", "--no-memory", *arguments])


def test_command_line_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    command = ["--workload", "siglip", "--batch", "2", "1", "--contenders", "stock", "matmul", "floor"]
    assert bench(*command, "--phase", "infer", "train", "--out", str(out), "--plot") == 0
    text = capsys.readouterr().out
    assert text.index("siglip infer, B=1") < text.index("siglip infer, B=2") < text.index("siglip train, B=1")
    assert "slower than stock" in text
    record = json.loads((out / "bench.json").read_text())
    assert record["command"].endswith(f"--out {out} --plot") and len(record["rows"]) == 12
    assert set(record["rows"][0]) == set(asdict(row()))
    assert report.read_csv(out / "bench.csv") == report.read_json(out / "bench.json")[0]
    assert {path.name for path in out.iterdir()} == {
        "bench.json",
        "bench.csv",
        "time_over_batch.png",
        "times_faster.png",
    }
    assert cli.main(["bench", "--read", str(out / "bench.json")]) == 0
    again = capsys.readouterr().out
    assert again == text[: text.index("written")]
    assert is_pristine()


def test_command_line_on_a_folder_ends_with_one_sentence(photos, capsys):
    (photos / "bad.png").write_text("no")
    assert bench("--sizes-from", str(photos), "--batch", "2", "--max-seq-len", "16", "--phase", "train") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not read: bad.png: ") and lines[1].startswith("4 images, ")
    assert lines[-1].startswith("On these 4 images (") and " for training (" in lines[-1] and lines[-1].count(". ") == 0


def test_slow_contenders_skip_larger_batches_and_that_is_said(capsys):
    options = ["--workload", "siglip", "--batch", "1", "2", "--phase", "infer", "--contenders", "stock", "floor"]
    assert bench(*options, "--patience", "1e-9") == 0
    text = capsys.readouterr().out
    assert re.search(r"not run: stock, took \d\.\d s at B=1\n", text) and "B=2" in text and text.count("│ stock") <= 1


@pytest.mark.parametrize("together", [False, True])
def test_strategies_are_on_while_they_are_timed(together, monkeypatch, capsys):
    seen, add = [], matmul.add_learned
    monkeypatch.setattr(matmul, "add_learned", lambda x, *rest: seen.append(len(x)) or add(x, *rest))
    options = ["--workload", "siglip", "diverse", "--batch", "2", "1", "--phase", "infer", "--contenders", "matmul"]
    assert bench(*options, *["--together"] * together) == 0
    text = capsys.readouterr().out
    assert text.index("diverse infer, B=1") < text.index("diverse infer, B=2")
    # One warm-up and one round each; in turns only where that was asked for.
    assert sorted(seen) == [1] * 4 + [2] * 4 and (seen[:4] == [1, 1, 2, 2]) is not together
    assert is_pristine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nope"], "'nope' is not a workload; valid: single, imagenet, siglip, diverse, extreme, radio"),
        (["--phase", "nope"], "'nope' is not a phase; valid: infer, frozen, train"),
        (["--dtype", "float8"], "'float8' is not a dtype; valid: float32, bfloat16, float16"),
        (["--contenders", "nope"], "'nope' is not a contender; valid: stock, stock-bilinear"),
        (["--batch", "0"], "must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--device", "tpu"], "valid: cpu, cuda"),
        (["--sizes-from", "/nope"], "/nope is not a folder"),
        (["--sizes-from", ".", "--workload", "siglip", "radio"], "names the one workload whose table is used"),
        (["--sizes-from", ".", "--rope"], "leave out --patch-embed and --rope"),
        (["--read", "/nope.json"], "/nope.json"),
    ],
)
def test_command_line_errors_are_one_line_and_come_first(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("naflex-fast bench: ") and err.count("\n") == 1 and out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys):
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


def test_other_suites_are_found_by_name(monkeypatch, capsys):
    clock, seen = Clock(), {}

    def races(workloads=None, dtypes=("float32",)):
        seen.update(workloads=workloads, dtypes=dtypes)
        yield Race("rope", "axial", "infer", 0, "float32", (clock.contender("stock", 1.0),))

    module = ModuleType("timm_naflex_fast.measure.bench.ropes")
    module.races = races
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert cli.main(["bench", "--rope", "--no-memory", "--rounds", "1", "--batch", "3", "--dtype", "float16"]) == 0
    assert seen == dict(workloads=None, dtypes=["float16"]) and "rope axial infer, float32\n" in capsys.readouterr().out
    monkeypatch.setitem(command.SUITES, "rope", "not_there")
    assert cli.main(["bench", "--rope"]) == 2
    assert "this version has no bench of rope" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--max-seq-len", "--patch-size"])
def test_what_divides_a_folders_images_needs_the_folder(option, capsys):
    assert bench(option, "16") == 2
    assert f"{option} goes with --sizes-from" in capsys.readouterr().err
