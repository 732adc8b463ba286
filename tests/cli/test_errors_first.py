"""What is wrong with a command's options is told before torch is imported, or before weights are
looked for."""

import json
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from timm_naflex_fast.cli.main import main

NAFLEX = "naflexvit_base_patch16_gap"
MODEL = ["--model", NAFLEX]
# In a process where torch and timm cannot be imported: for each call its exit status and stderr.
WITHOUT_TORCH = """
import contextlib, io, json, sys
from timm_naflex_fast.cli.main import main

sys.modules["torch"] = sys.modules["timm"] = None
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
MODEL_COMMANDS = [["drift"], ["bench"], ["export", "--out", "m.pt2"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the calls name."""
    folder = tmp_path_factory.mktemp("calls")
    for name in ("empty", "unreadable", "good"):
        (folder / name).mkdir()
    (folder / "unreadable" / "text.png").write_text("no image")
    (folder / "unreadable" / "more.jpg").write_text("")
    Image.new("RGB", (40, 30)).save(folder / "good" / "photo.png")
    (folder / "file.txt").write_text("text")
    save_file({"table": torch.ones(2, 2, 1)}, folder / "table.safetensors")
    ported = {name: torch.ones(2, 2) for name in ("table", "sizes", "result")}
    save_file(ported, folder / "ported.safetensors")
    return folder


@pytest.fixture(scope="module")
def without_torch(folder):
    """Runs the calls in one process, in which importing torch raises."""

    def run(calls):
        command = [sys.executable, "-c", WITHOUT_TORCH]
        given = json.dumps(calls)
        ended = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


def wrong_calls():
    """Calls with one mistake each, and the words that name it."""
    calls = []
    for words in MODEL_COMMANDS:
        calls += [
            (words, "a model is needed: --model NAME"),
            ([*words, *MODEL, "--checkpoint", "no.pth"], "no checkpoint at no.pth"),
            ([*words, *MODEL, "--checkpoint", "empty"], "the folder empty holds no weights"),
        ]
    for command, option in (("drift", "--images"), ("bench", "--sizes-from")):
        words = [command, *MODEL, option]
        calls += [
            ([*words, "nowhere"], "nowhere is not a folder of images"),
            ([*words, "empty"], "empty holds no image"),
            ([*words, "unreadable"], "none of the images can be read: .*more.jpg.*text.png"),
        ]
    for command in ("drift", "bench"):
        calls += [
            ([command, *MODEL, "--json", "no/m.json"], "No such file or directory: 'no/m.json'"),
            ([command, *MODEL, "--contenders", "nope"], "invalid choice: 'nope' .*stock.*matmul"),
            ([command, *MODEL, "--batch-size", "0"], "--batch-size: invalid positive value: '0'"),
        ]
    return [
        *calls,
        (["drift", *MODEL, "--out", "file.txt/folder"], "file.txt/folder"),
        (["bench", *MODEL, "--max-seq-len", "4", "--workload", "siglip"], "leave out --workload"),
        (["drift", *MODEL, "--checkpoint", "m.pth", "--random-weights"], "not allowed with"),
        (["bench", *MODEL, "--budget", "nan"], "--budget: invalid seconds value: 'nan'"),
        (["bench", *MODEL, "--contenders", "plain-add"], "invalid choice: 'plain-add'"),
        (["bench", *MODEL, "--phase", "frozen"], "invalid choice: 'frozen' .*train.*infer"),
        (["drift", *MODEL, "--stage-from", "patches"], "--stage-from goes with --against"),
        (["export", *MODEL, "--out", "m.bin"], "--out must end with .onnx or .pt2; got m.bin"),
        (["export", *MODEL, "--out", "no/m.pt2"], "No such file or directory: 'no/m.pt2'"),
        (["identify", "no.safetensors"], "no.safetensors"),
        (["identify", "good"], "good is a folder; valid: a safetensors file"),
        (["identify", "file.txt"], "file.txt is not a safetensors file"),
        (["identify", "table.safetensors"], "lacks result, sizes"),
        (["identify", "file.txt", "--family", "clip"], "invalid choice: 'clip' .*siglip2"),
        (["bnech"], "no command 'bnech'; did you mean bench?"),
    ]


def test_a_mistake_is_told_without_torch(without_torch):
    calls = wrong_calls()
    for (words, message), (status, err) in zip(calls, without_torch([call for call, _ in calls])):
        last = err.splitlines()[-1]
        assert status == 2 and re.search(message, last), (words, err)
        assert "loading" not in err, (words, err)


def test_a_right_call_says_what_it_does_before_it_imports_torch(without_torch):
    images = ["--images", "good"]
    calls = {
        f"loading {NAFLEX} ...": [
            ["drift", *MODEL, *images],
            ["bench", *MODEL],
            ["export", *MODEL, "--out", "m.pt2"],
        ],
        "comparing ported.safetensors ": [["identify", "ported.safetensors"]],
        "looking at this installation ": [["info"]],
    }
    for says, words in calls.items():
        for _, err in without_torch(words):
            first, last = err.splitlines()
            assert first.startswith(says)
            assert "import of torch halted" in last or "import of timm halted" in last


def test_a_model_that_timm_lacks_is_told_before_weights_are_looked_for(monkeypatch, capsys):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError("weights")))
    assert main(["bench", "--model", "resnet18"]) == 2
    loading, line = capsys.readouterr().err.splitlines()
    assert loading == "loading resnet18 ..."
    assert "timm has no NaFlexVit 'resnet18'; valid: naflexvit" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told_before_the_model_is_made(monkeypatch, capsys):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError("weights")))
    assert main(["bench", *MODEL, "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU here; valid: --device cpu" in capsys.readouterr().err
