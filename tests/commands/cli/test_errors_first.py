"""What is wrong with a command's options is told before torch is imported, or before weights are
looked for."""

import json
import re
import subprocess
import sys

import pytest
from PIL import Image

from timm_naflex_fast.commands.cli.main import COMMANDS

NAFLEX = "naflexvit_base_patch16_gap"
# In a process where some modules cannot be imported: for each call its exit status and stderr.
WITHOUT_TORCH = """
import contextlib, io, json, sys
from timm_naflex_fast.commands.cli.main import main

for name in sys.argv[1:]:
    sys.modules[name] = None
found = []
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    found.append((status, err.getvalue()))
print(json.dumps(found))
"""
# Command lines with one mistake each, in which MODEL is ``--model NAME``, and the words that name
# the mistake.
WRONG = {
    "drift": "a model is needed: --model NAME",
    "bench": "a model is needed: --model NAME",
    "export --out m.pt2": "a model is needed: --model NAME",
    "drift MODEL --checkpoint no.pth": "no file or folder no.pth, and no such model in the hub's cache",
    "bench MODEL --checkpoint empty": "the folder empty must hold one file of weights; found: none",
    "drift MODEL --checkpoint m.pth --random-weights": "not allowed with",
    "drift MODEL --images nowhere": "nowhere is not a folder of images",
    "drift MODEL --images empty": "empty is not a folder of images",
    "drift MODEL --json no/m.json": "no/m.json cannot be written: No such file or directory",
    "bench MODEL --json empty": "empty cannot be written: Is a directory",
    "drift --model naflexvit_base_patch16_gapp": "no NaFlexVit .*; did you mean naflexvit_base_patch16_gap?",
    "drift MODEL --out file.txt/folder": "file.txt/folder",
    "bench MODEL --modes plain-add": "invalid choice: 'plain-add' .*stock.*matmul",
    "drift MODEL --model-kwargs a": "invalid setting value: 'a'",
    "bench MODEL --batch-size 0": "--batch-size: invalid positive value: '0'",
    "export MODEL --out m.bin": "--out must end with .onnx or .pt2; got m.bin",
    "export MODEL --out no/m.pt2": "no/m.pt2 cannot be written: No such file or directory",
    "export MODEL --out \udcff.onnx": "the path of --out must be UTF-8.* got \\\\udcff.onnx",
    "run --mode matmull x.py": "'matmull' is not valid for --mode; valid: 'stock', .*; did you mean matmul?",
    "run --library transformers --mode grid-sample x.py": "'grid_sample' is not valid for --mode",
    "record MODEL --out no --interpolation box --pixels-of good": "--pixels-of goes without",
    "record MODEL --out no --pixels-of good": "there is no file good/recording.json",
    "run no/train.py --lr 1": "there is no file no/train.py, and no command of that name",
    "run": "the following arguments are required: SCRIPT",
    "info --fast": "unrecognized arguments: --fast",
}
# Right ones, and how the first line that each prints begins.
RIGHT = {
    "drift MODEL --images good": f"loading {NAFLEX} ...",
    "bench MODEL": f"loading {NAFLEX} ...",
    "export MODEL --out m.pt2": f"loading {NAFLEX} ...",
    "info": "looking at this installation ",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the calls name."""
    folder = tmp_path_factory.mktemp("calls")
    for name in ("empty", "good"):
        (folder / name).mkdir()
    Image.new("RGB", (40, 30)).save(folder / "good" / "photo.png")
    (folder / "file.txt").write_text("text")
    return folder


@pytest.fixture(scope="module")
def without_torch(folder):
    """Runs the calls in one process, in which importing torch raises."""

    def run(calls, *more):
        command = [sys.executable, "-c", WITHOUT_TORCH, "torch", *more]
        given = json.dumps([call.replace("MODEL", f"--model {NAFLEX}").split() for call in calls])
        ended = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


def test_help_needs_no_numpy_either(without_torch):
    help = [*(f"{name} --help" for name in COMMANDS), "--help", "--version"]
    assert without_torch(help, "numpy") == [[0, ""]] * len(help)


def test_a_mistake_is_told_without_torch(without_torch):
    for (call, message), (status, err) in zip(WRONG.items(), without_torch([*WRONG])):
        last = err.splitlines()[-1]
        assert status == 2 and re.search(message, last), (call, err)
        assert "loading" not in err, (call, err)


def test_a_right_call_says_what_it_does_before_it_imports_torch(without_torch):
    for says, (_, err) in zip(RIGHT.values(), without_torch([*RIGHT])):
        first, last = err.splitlines()
        assert first.startswith(says)
        assert "import of torch halted" in last
