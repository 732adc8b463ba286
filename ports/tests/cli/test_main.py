"""The command line itself: whatever stops it is one line, and figures go where they are wanted."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from on_the_kit import KIT

from vit_ports import __version__
from vit_ports.cli.main import main
from vit_ports.cli.output import marked, table


def test_the_command_and_the_module_are_one(capsys):
    for options in ([], ["--help"], ["--version"], ["compare", "--help"], ["comp"]):
        run = [sys.executable, "-m", "vit_ports", *options]
        ended = subprocess.run(run, capture_output=True, text=True)
        with pytest.raises(SystemExit) as end:
            main(options)
        out, err = capsys.readouterr()
        assert (ended.returncode, ended.stdout) == (end.value.code, out)
        assert err.startswith("usage: vit-ports") or not err
    assert main(["compare", str(KIT), str(KIT)]) == 0


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("a\nb\x1b[31m\u202e \udcff é 写"), 2, "a\\nb\\x1b[31m\\u202e \\udcff é 写"),
        (OSError("full"), 2, "full"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_whatever_stops_a_command_is_one_line_of_text(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("vit_ports.cli.compare.compare_folders", Mock(side_effect=error))
    assert main(["compare", "REFERENCE", "PORT"]) == status
    assert capsys.readouterr().err == (f"vit-ports compare: {line}\n" if line else "")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(buffering):
    """What is printed fails at once, or at the end."""
    environment = {**os.environ, "PYTHONUNBUFFERED": buffering}
    command = [sys.executable, "-m", "vit_ports", "compare", str(KIT)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as run:
        run.stdout.close()
        err = run.stderr.read()
    assert (run.returncode, err) == (141, "")


def test_with_json_on_stdout_the_words_go_to_stderr(capsys):
    assert main(["compare", str(KIT), str(KIT), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["vit_ports"], found["first"], found["reason"]) == (__version__, None, None)
    assert all(sentence in err for sentence in found["verdict"])


def test_figures_stand_to_the_right_and_words_to_the_left():
    lines = [{"who": "stock", "ms": "1"}, {"who": "us", "ms": "234"}]
    assert table(lines).split("\n") == ["who     ms", "stock    1", "us     234"]


MARKED = "     stage\n✓ ok norm\n"


@pytest.mark.parametrize(
    ("encoding", "on_terminal", "shown"),
    [
        ("utf-8", False, MARKED),
        ("utf-8", True, "     stage\n\x1b[32m✓ ok\x1b[0m norm\n"),
        ("ascii", True, "   stage\nok norm\n"),
    ],
)
def test_a_mark_is_shown_as_the_console_can(encoding, on_terminal, shown, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", Mock(encoding=encoding, isatty=lambda: on_terminal))
    assert marked(MARKED) == shown
