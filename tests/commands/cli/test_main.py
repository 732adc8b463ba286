"""The command line itself: it answers at once, and whatever stops it is one line."""

import argparse
import io
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import timm_naflex_fast
from timm_naflex_fast.commands.cli.main import COMMANDS, call, main

PACKAGE = Path(timm_naflex_fast.__file__).parent
HEAVY = """
import sys
from timm_naflex_fast.commands.cli.main import main
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
    for module in (timm_naflex_fast, timm_naflex_fast.functional):
        assert all(hasattr(module, name) for name in {*dir(module), *module.__all__})
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [(KeyboardInterrupt(), 130, "interrupted"), (ValueError("a\nb\x1b["), 2, "a\\nb\\x1b[")],
)
def test_whatever_stops_a_command_is_one_line_of_text(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.commands.cli.info.info", Mock(side_effect=error))
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
        "import sys; from timm_naflex_fast.commands.cli.main import main; main(['info']); "
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


COMMAND = [sys.executable, "-m", "timm_naflex_fast"]


@pytest.fixture(params=[False, True], ids=["buffered", "unbuffered"])
def buffering(request, monkeypatch):
    """What is printed fails at once, or at the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if request.param:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")


def test_no_command_lists_them(capsys):
    assert main([]) == 2
    listed = capsys.readouterr().err
    for name in COMMANDS:
        assert re.search(rf"^    {name} ", listed, re.M)


def test_a_wrong_word_gets_one_usage_line_and_the_nearest_right_one(capsys):
    with pytest.raises(SystemExit):
        main(["drift", "--aginst", "transformers"])
    usage, says = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: naflex-fast drift [OPTIONS]")
    assert says == (
        "naflex-fast drift: unrecognized arguments: --aginst transformers; did you mean --against?"
    )


def test_debug_shows_the_traceback_of_an_error(capsys):
    given = ["identify", "--debug", "no.safetensors"]
    assert main(given) == 2
    traceback, line = capsys.readouterr().err.rsplit("\n", 2)[:2]
    assert traceback.startswith("Traceback") and "in call\n" in traceback
    assert line.startswith("naflex-fast identify: ")


def test_a_reader_that_goes_away_ends_a_command_without_a_word(buffering):
    with subprocess.Popen([*COMMAND, "info"], stdout=-1, stderr=-1, text=True) as run:
        run.stdout.close()
        err = run.stderr.read()
    assert (run.returncode, err) == (141, "looking at this installation ...\n")


def found(options):
    """A command that finds something, and is stopped."""
    print("words")
    options.figures.update(a=1)
    raise KeyboardInterrupt


def test_json_for_a_dash_goes_to_stdout_and_the_words_to_stderr(capsys):
    call("naflex-fast", found, argparse.Namespace(json="-"))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err == "words\nnaflex-fast: interrupted\n"


def test_what_a_stopped_command_has_found_is_in_its_file(tmp_path):
    file = tmp_path / "found.json"
    assert call("naflex-fast", found, argparse.Namespace(json=str(file))) == 130
    assert json.loads(file.read_text()) == {"a": 1}


def test_figures_that_nobody_asked_for_are_not_written(capsys):
    call("naflex-fast", found, argparse.Namespace(json=None))
    assert capsys.readouterr().out == "words\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [("drift", "--contenders"), ("bench", "--contenders"), ("record --out new", "--contender")],
)
def test_the_older_name_of_modes_works_and_no_help_names_it(command, option, capsys):
    parser = argparse.ArgumentParser()
    name, *needed = command.split()
    import_module(f"timm_naflex_fast.commands.cli.{name}").add_arguments(parser)
    options = vars(parser.parse_args([*needed, option, "grid_sample"]))
    assert options.get("modes", [options.get("mode")]) == ["grid_sample"]
    with pytest.raises(SystemExit):
        main([*command.split(), option, "nope"])
    assert f"argument {option}: invalid choice: 'nope'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command.split()[0], "--help"])
    assert "contender" not in capsys.readouterr().out
