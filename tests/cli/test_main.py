"""The command line itself: it answers at once, and whatever stops it is one line."""

import io
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import timm_naflex_fast
from timm_naflex_fast.cli.main import COMMANDS, main
from timm_naflex_fast.patching import install

PACKAGE = Path(timm_naflex_fast.__file__).parent
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
    wrong = [[], ["nonsense"], ["run"], ["run", "--mode", "fast", "x.py"], ["info", "--fast"]]
    code = HEAVY.format(words=right + wrong)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.findall(r"^\[.*", run.stdout, re.M) == [
        *(f"{words} 0" for words in right),
        *(f"{words} 2" for words in wrong),
    ]
    for name in COMMANDS:  # as the help says
        assert re.search(rf"^    {name} ", run.stdout, re.M)


def test_the_packages_names_are_found_when_asked_for():
    names = ["Handle", "Status", "disable", "enable", "functional", "status"]
    assert sorted(timm_naflex_fast.__all__) == names
    assert sorted(name for name in dir(timm_naflex_fast) if not name.startswith("__")) == names
    for module in (timm_naflex_fast, timm_naflex_fast.functional, install):
        assert all(hasattr(module, name) for name in {*dir(module), *module.__all__})
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [(KeyboardInterrupt(), 130, "interrupted"), (ValueError("a\nb\x1b["), 2, "a\\nb\\x1b[")],
)
def test_whatever_stops_a_command_is_one_line_of_text(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.cli.main.import_module", Mock(side_effect=error))
    assert main(["info"]) == status
    assert capsys.readouterr().err == f"naflex-fast info: {line}\n"


def test_info_says_what_a_report_needs(capsys, monkeypatch, tmp_path):
    # Another torch, later on the path: Python does not import it.
    (tmp_path / "torch-0.0.1.dist-info").mkdir()
    (tmp_path / "torch-0.0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with timm_naflex_fast.enable("interpolate_cached"):
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("timm-naflex-fast", "timm", "torch", "triton", "python", "CUDA"):
        assert len(re.findall(rf"^{name} +\S", out, re.M)) == 1, name
    assert torch.__version__.split("+")[0] in out
    assert re.search("_apply_learned_pos_embed +interpolate_cached", out)
    assert "\nNext: naflex-fast drift --model NAME " in out


def test_info_imports_no_timm_and_the_functions_no_compiler():
    code = (
        "import sys; from timm_naflex_fast.cli.main import main; main(['info']); "
        "assert 'timm' not in sys.modules; import timm_naflex_fast.functional; "
        "assert not {'torch._dynamo', 'einx', 'timm'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_terminal_that_cannot_show_a_letter_shows_its_number(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    main(["info"])
    print("\u00e4.png", flush=True)
    assert shown.getvalue().endswith(b"\\xe4.png\n")
