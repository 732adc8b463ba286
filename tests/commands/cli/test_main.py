"""The command line itself: it answers at once, and whatever stops it is one line."""

import os
import re
import subprocess
import sys
from unittest.mock import Mock
from zipfile import BadZipFile

import pytest
import torch

import timm_naflex_fast
from timm_naflex_fast.commands.cli.main import COMMANDS, main


def test_the_help_names_every_command_in_three_groups(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().err
    groups = r"^use:\n(?:    .+\n)+^measure:\n(?:    .+\n)+^port:\n    .+\n"
    (found,) = re.findall(groups, listed, re.M)
    assert re.findall(r"^    (\S+) ", found, re.M) == [*COMMANDS]


def test_the_packages_names_are_found_when_asked_for():
    names = ["Handle", "Status", "disable", "enable", "functional", "status"]
    assert sorted(timm_naflex_fast.__all__) == names
    assert sorted(name for name in dir(timm_naflex_fast) if not name.startswith("__")) == names
    functions = timm_naflex_fast.functional
    assert all(hasattr(functions, name) for name in {*dir(functions), *functions.__all__})
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("a\nb\x1b["), 2, "a\\nb\\x1b["),
        (BadZipFile("a\nb"), 2, "BadZipFile: a b (--debug shows where)"),
    ],
)
def test_whatever_stops_a_command_is_one_line_of_text(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.commands.cli.info.action", Mock(side_effect=error))
    assert main(["info"]) == status
    assert capsys.readouterr().err == f"naflex-fast info: {line}\n"


def test_info_says_what_a_report_needs(capsys):
    with timm_naflex_fast.enable("interpolate_cached"):
        assert main(["info"]) == 0
    out = capsys.readouterr().out
    for name in ("timm-naflex-fast", "timm", "torch", "triton", "python", "CUDA"):
        assert len(re.findall(rf"^{name} +\S", out, re.M)) == 1, name
    assert torch.__version__.split("+")[0] in out
    assert re.search("_apply_learned_pos_embed +interpolate_cached", out)


def test_info_imports_no_timm_and_no_other_command_and_the_functions_no_compiler():
    code = (
        "import sys; from timm_naflex_fast.commands.cli.main import main; main(['info']); "
        "assert not {'timm', 'timm_naflex_fast.commands.cli.drift'} & {*sys.modules}; "
        "import timm_naflex_fast.functional; "
        "assert not {'torch._dynamo', 'einx', 'timm'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_debug_shows_the_traceback_of_an_error(capsys):
    given = ["drift", "--debug"]
    assert main(given) == 2
    traceback, line = capsys.readouterr().err.rsplit("\n", 2)[:2]
    assert traceback.startswith("Traceback") and "in call\n" in traceback
    assert line.startswith("naflex-fast drift: ")


PRINTS = """
import argparse, sys
from timm_naflex_fast.commands.cli.main import call
sys.stdin.read()
sys.exit(call("naflex-fast", lambda options: print("words"), argparse.Namespace()))
"""


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(buffering):
    """What is printed fails at once, or at the end."""
    environment = {**os.environ, "PYTHONUNBUFFERED": buffering}
    options = dict(stdin=-1, stdout=-1, stderr=-1, text=True, env=environment)
    with subprocess.Popen([sys.executable, "-c", PRINTS], **options) as run:
        run.stdout.close()
        run.stdin.close()
        err = run.stderr.read()
    assert (run.returncode, err) == (141, "")
