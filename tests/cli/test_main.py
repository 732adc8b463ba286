"""The command line itself: it answers at once, and errors are one line with what is valid."""

import ast
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

import timm_naflex_fast
from timm_naflex_fast.cli.main import COMMANDS, call, main

PACKAGE = Path(timm_naflex_fast.__file__).parent
WITHOUT_TORCH = """
import sys
from timm_naflex_fast.cli.main import main
for words in {words}:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code or 0
    print(words, code, *[name for name in ("torch", "timm", "numpy") if name in sys.modules])
"""


def without_torch(*words):
    code = WITHOUT_TORCH.format(words=words)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [line for line in out.splitlines() if line.startswith("[")]


def test_version_help_and_wrong_options_import_no_torch():
    wrong = [["--nonsense"], ["nonsense"], [], ["--", "info"], ["run"], ["run", "--mode", "fast", "x.py"]]
    wrong += [["run", "--mode"], ["identify"], ["info", "--fast"]]
    answers = without_torch(["--version"], ["--help"], ["run", "--help"], ["identify", "--help"], *wrong)
    assert answers[:4] == [
        f"{words} 0" for words in (["--version"], ["--help"], ["run", "--help"], ["identify", "--help"])
    ]
    assert answers[4:] == [f"{words} 2" for words in wrong]


@pytest.mark.parametrize("command", ["bench", "drift"])
def test_a_measuring_commands_options_import_no_torch(command):
    words = [command, "--help"], [command, "--nonsense"], [command, "--max-seq-len", "many"]
    assert without_torch(*words) == [f"{w} {0 if '--help' in w else 2}" for w in words]


def test_importing_the_package_imports_no_torch():
    code = "import sys, timm_naflex_fast; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert timm_naflex_fast.__getattr__("functional").__name__ == "timm_naflex_fast.functional"
    assert timm_naflex_fast.__getattr__("enable") is timm_naflex_fast.enable and "status" in dir(timm_naflex_fast)
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        timm_naflex_fast.enabled  # noqa: B018


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {name} ", out, re.M) for name in COMMANDS)


# Installed only by those who use it, or brought by torch (triton), torchvision (Pillow, NumPy) and timm (tqdm).
OPTIONAL = {"tqdm", "pytest", "transformers", "triton", "torchvision", "skimage", "PIL", "numpy"}


def test_dependencies_are_what_is_imported():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported.update(name.split(".")[0] for name in names)
    declared = requires("timm-naflex-fast")
    runtime = {re.match(r"[\w-]+", line)[0] for line in declared if "extra ==" not in line}
    extra = {re.match(r"[\w-]+", line)[0] for line in declared if "extra ==" in line}
    ours = {*sys.stdlib_module_names, "timm_naflex_fast", "sitecustomize"}
    assert runtime <= imported
    assert imported - ours - OPTIONAL <= runtime | extra


def naflex(*words, prelude="", **options):
    """Start the command with a prelude in shell: redirections."""
    line = f'exec "$0" -m timm_naflex_fast {" ".join(words)} {prelude}'
    return subprocess.run(["sh", "-c", line, sys.executable], text=True, timeout=120, **options)


def test_a_closed_stdout_or_stderr_is_one_line():
    pipe = subprocess.PIPE
    done = naflex("bench", prelude=">&-", stderr=pipe)
    assert (done.returncode, done.stderr) == (2, "naflex-fast bench: stdout or stderr is closed\n")
    done = naflex("drift", prelude="2>&-", stdout=pipe)
    assert (done.returncode, done.stdout) == (2, "naflex-fast drift: stdout or stderr is closed\n")
    done = naflex("info", prelude=">/dev/full", stderr=pipe)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space" in done.stderr


def test_ctrl_c_is_one_line(capsys):
    def stopped(options):
        raise KeyboardInterrupt

    assert call("naflex-fast drift", stopped, None) == 130
    assert capsys.readouterr().err == "naflex-fast drift: interrupted\n"


def test_ctrl_c_during_a_commands_imports_is_one_line(monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("timm_naflex_fast.cli.main.import_module", stopped)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "naflex-fast info: interrupted\n"


def test_errors_are_one_line_of_text(capsys):
    def fails(options):
        raise ValueError("a\nb\x1b[31m")

    assert call("x", fails, None) == 2
    assert capsys.readouterr().err == "x: a\\nb\\x1b[31m\n"
