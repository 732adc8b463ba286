"""``naflex-fast bench`` from end to end."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from measured import row
from oracles import is_pristine

from timm_naflex_fast.backends import choose
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench import command, report

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments):
    return cli.main(["bench", "--channels", "4", "--rounds", "1", "--no-memory", *arguments])


@pytest.mark.ran("matmul")
def test_command_line_end_to_end(tmp_path, capsys):
    out = tmp_path / "figures.json"
    command = ["--workload", "siglip", "--batch", "2", "1", "--contenders", "stock", "matmul", "plain-add"]
    assert bench(*command, "--phase", "infer", "train", "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert text.index("siglip infer, B=1") < text.index("siglip infer, B=2") < text.index("siglip train, B=1")
    record = json.loads(out.read_text())
    assert record["command"].endswith(f"--json {out}") and len(record["rows"]) == 12
    assert set(record["rows"][0]) == set(asdict(row()))
    rows, about = report.read_json(out)
    assert {one.contender: one.ours for one in rows} == {"stock": False, "matmul": True, "plain-add": False}
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]
    assert is_pristine()


def test_names_of_the_last_release_still_work(tmp_path, capsys):
    names = ["--contenders", "stock", "stock-bilinear", "floor"]
    with pytest.warns(FutureWarning, match=r"'stock-bilinear' is now called 'timm-flag-bilinear'"):
        with pytest.warns(FutureWarning, match=r"'floor' is now called 'plain-add'"):
            options = ["--workload", "diverse", "--batch", "1", "--phase", "infer", "--json", str(tmp_path / "new")]
            assert bench(*options, *names) == 0
    rows, _ = report.read_json(tmp_path / "new")
    assert [one.contender for one in rows] == ["stock", "timm-flag-bilinear", "plain-add"]


def test_an_unwritable_file_is_noticed_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_measure", lambda *_: pytest.fail("it measured"))
    for path in (tmp_path / "missing" / "a.json", tmp_path):
        assert bench("--json", str(path)) == 2
        err = capsys.readouterr().err
        assert str(path) in err and err.count("\n") == 1


def test_the_options_need_neither_torch_nor_timm():
    package = f"p = types.ModuleType('timm_naflex_fast'); p.__path__ = [{str(ROOT / 'timm_naflex_fast')!r}]; "
    code = (
        f"import argparse, sys, types; {package}sys.modules.update(torch=None, timm=None, timm_naflex_fast=p); "
        "from timm_naflex_fast.measure.bench.command import add_arguments; "
        "p = argparse.ArgumentParser(); add_arguments(p); p.parse_args(['--workload', 'siglip']); p.print_help()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "diverse" in done.stdout and "matmul" in done.stdout, done.stderr


@pytest.mark.ran("matmul")
def test_command_line_on_a_folder_ends_with_one_sentence(photos, capsys):
    (photos / "bad.png").write_text("no")
    assert bench("--sizes-from", str(photos), "--batch", "2", "--max-seq-len", "16", "--phase", "train") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not read: bad.png: ") and lines[1].startswith("4 images, ")
    assert lines[-1].startswith("On these 4 images (") and " for training (" in lines[-1] and lines[-1].count(". ") == 0


def test_strategies_are_on_while_they_are_timed(monkeypatch, capsys):
    seen, add = [], choose.add
    monkeypatch.setattr(choose, "add", lambda x, *rest: seen.append(len(x)) or add(x, *rest))
    options = ["--workload", "siglip", "diverse", "--batch", "2", "1", "--phase", "infer", "--contenders", "matmul"]
    assert bench(*options) == 0
    text = capsys.readouterr().out
    assert text.index("siglip infer, B=2") < text.index("diverse infer, B=1") < text.index("diverse infer, B=2")
    assert seen == [1, 1, 2, 2] * 2  # one warm-up and one round each
    assert is_pristine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nope"], "'nope' is not a workload; valid: single, imagenet, siglip, diverse, extreme, radio"),
        (["--phase", "nope"], "'nope' is not a phase; valid: infer, frozen, train"),
        (["--dtype", "float8"], "'float8' is not a dtype; valid: float32, bfloat16, float16"),
        (["--contenders", "nope"], "'nope' is not a contender; valid: stock, interpolate_cached"),
        (["--batch", "0"], "--batch must be above 0; got [0]"),
        (["--rounds", "0"], "--rounds must be above 0; got 0"),
        (["--budget", "0"], "--budget must be above 0"),
        (["--device", "tpu"], "valid: cpu, cuda"),
        (["--sizes-from", "/nope"], "/nope is not a folder"),
        (["--sizes-from", ".", "--workload", "siglip", "radio"], "names the one workload whose table is used"),
        (["--model", "resnet18"], "timm has no NaFlexVit 'resnet18'; valid: naflexvit_base_patch16_gap"),
        (["--model", "m", "--contenders", "plain-add"], "'plain-add' is not a contender; valid: stock, interpolate"),
        (["--model", "m", "--phase", "frozen"], "'frozen' is not a phase; valid: infer, train"),
        (["--model", "m", "--dtype", "float16"], "'float16' is not a dtype; valid: float32, bfloat16"),
        (["--model", "m", "--channels", "4"], "--channels goes with the embedding step alone"),
        (["--model", "m", "--patch-size", "4"], "--patch-size goes with --sizes-from"),
        (["--model", "m", "--seq-len", "4", "--workload", "siglip"], "leave out --workload"),
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


@pytest.mark.parametrize("option", ["--max-seq-len", "--patch-size"])
def test_what_divides_a_folders_images_needs_the_folder(option, capsys):
    assert bench(option, "16") == 2
    assert f"{option} goes with --sizes-from" in capsys.readouterr().err


@pytest.mark.slow
def test_keep_heap_starts_again_with_glibcs_settings(capfd):
    work = ["--workload", "siglip", "--batch", "2", "--channels", "8", "--phase", "infer", "--rounds", "1"]
    assert cli.main(["bench", "--keep-heap", *work, "--budget", "0.01", "--no-memory"]) == 0
    assert "matmul" in capfd.readouterr().out
