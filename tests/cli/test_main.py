"""The command line itself: it answers at once, and whatever stops it is one line."""

import ast
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import timm_naflex_fast
from tests.support.oracles import embed, small_vit
from timm_naflex_fast.cli.main import COMMANDS, main

PACKAGE = Path(timm_naflex_fast.__file__).parent
# Installed only by those who use it, or brought by torch, torchvision (Pillow, NumPy) and timm
# (tqdm, huggingface_hub).
OPTIONAL = {
    "tqdm",
    "transformers",
    "triton",
    "torchvision",
    "skimage",
    "PIL",
    "numpy",
    "huggingface_hub",
    "onnxruntime",
    "openvino",
}
SMALL = (
    "--model naflexvit_base_patch16_gap --random-weights "
    "--model-kwargs embed_dim=32 depth=1 num_heads=2"
)
HEAVY = """
import sys
from timm_naflex_fast.cli.main import main
for words in {words}:
    try:
        sys.exit(main(words))
    except SystemExit as end:
        code = end.code or 0
    print(words, code, *[name for name in ("torch", "timm", "numpy") if name in sys.modules])
"""


def test_help_and_wrong_words_import_nothing_heavy():
    right = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    wrong = [
        [],
        ["--nonsense"],
        ["nonsense"],
        ["--", "info"],
        ["run"],
        ["run", "--mode", "fast", "x.py"],
        ["run", "--mode"],
        ["identify"],
        ["info", "--fast"],
        ["bench", "--fast"],
        ["bench", "--max-seq-len", "many"],
        ["drift", "--fast"],
        ["drift", "--max-seq-len", "many"],
    ]
    code = HEAVY.format(words=right + wrong)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall(r"^\[.*", run.stdout, re.M) == [
        *(f"{words} 0" for words in right),
        *(f"{words} 2" for words in wrong),
    ]
    for name in COMMANDS:  # as the help says
        assert re.search(rf"^    {name} ", run.stdout, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --json / --model naflexvit_base_patch16_gap", "Is a directory: '/'"),
        (f"export {SMALL} --out m.pt2 --size 33 48", "multiple .* 16 x 16"),
    ],
)
def test_what_the_model_or_the_file_forbids_is_one_line(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = arguments.split()[0]
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    *before, line = err.splitlines()
    assert line.startswith(f"naflex-fast {command}: ") and re.search(message, line)
    assert all(text.startswith("loading ") for text in before)
    assert out == "" and not [*tmp_path.iterdir()]


def test_the_packages_names_are_found_when_asked_for():
    names = ["Handle", "disable", "enable", "functional", "status"]
    assert sorted(timm_naflex_fast.__all__) == names
    assert sorted(name for name in dir(timm_naflex_fast) if not name.startswith("__")) == names
    assert timm_naflex_fast.__getattr__("functional").__name__ == "timm_naflex_fast.functional"
    assert timm_naflex_fast.__getattr__("enable") is timm_naflex_fast.enable
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


def imported_packages():
    """The top-level names that the package's files import."""
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    return imported - {*sys.stdlib_module_names, "timm_naflex_fast", "sitecustomize"}


def test_dependencies_are_what_is_imported():
    required = {"always": set(), "extra": set()}
    for line in requires("timm-naflex-fast"):
        kind = "extra" if "extra ==" in line else "always"
        required[kind].add(re.match(r"[\w-]+", line)[0])
    imported = imported_packages()
    assert required["always"] <= imported
    assert imported - OPTIONAL <= required["always"] | required["extra"]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [(KeyboardInterrupt(), 130, "interrupted"), (ValueError("a\nb\x1b["), 2, "a\\nb\\x1b[")],
)
def test_whatever_stops_a_command_is_one_line_of_text(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.cli.main.import_module", Mock(side_effect=error))
    assert main(["info"]) == status
    assert capsys.readouterr().err == f"naflex-fast info: {line}\n"


def test_info_says_what_a_report_needs(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "nothing is patched in this process; enable() or naflex-fast run does it" in out
    for name in ("timm-naflex-fast", "timm", "torch", "triton", "python", "CUDA", "caches"):
        assert len(re.findall(rf"^{name} +\S", out, re.M)) == 1, name
    assert "\nNext: naflex-fast drift --model NAME " in out


def test_info_tells_what_is_patched_and_kept(capsys):
    with timm_naflex_fast.enable("interpolate_cached"):
        model = small_vit().requires_grad_(False)
        embed(model)
        embed(model)
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search("_apply_learned_pos_embed +interpolate_cached", out)
    assert torch.__version__.split("+")[0] in out
    assert "of 512 MiB cached" in out and "resized tables" in out and " 0 resized tables" not in out


def test_info_imports_no_timm_and_the_functions_no_compiler():
    code = (
        "import sys; from timm_naflex_fast.cli.main import main; main(['info']); "
        "assert 'timm' not in sys.modules; import timm_naflex_fast.functional; "
        "assert not {'torch._dynamo', 'einx', 'timm'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
