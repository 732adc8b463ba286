"""What commands read, print and write: options, progress, files, and where figures come from.

Tests: tests/commands/measure/test_files.py.
"""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

QUIET_SECONDS = 10.0  # without a terminal, progress is printed this often


def positive(text: str) -> int:
    """An option's whole number; one below 1 is a ValueError, which argparse reports."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def printable(text: object) -> str:
    """Text on one line of a terminal.

    Control characters, line ends and bytes that are no text become escapes.
    """
    characters = []
    for character in str(text):
        if not character.isprintable():
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)


def one_line(error: Exception) -> str:
    """The kind of an error and what it says, without long lists, and cut after a word."""
    # Of names in quotes, as torch lists those of tensors, the first three.
    text = re.sub(r'((?:"[^"]+", ){3})(?:"[^"]+"(?:, )?)+', r"\1...", str(error))
    return textwrap.shorten(f"{type(error).__name__}: {text}", 400, placeholder=" ...")


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def progress(what: str, parts: Iterable[Any]) -> Any:
    """The parts of a long work, one after the other, with a tqdm bar on stderr."""
    from tqdm import tqdm

    seconds = 0.2 if sys.stderr.isatty() else QUIET_SECONDS
    return tqdm(
        parts,
        desc=what,
        file=sys.stderr,
        mininterval=seconds,
        miniters=0,
        smoothing=0,
        bar_format="{desc}: {percentage:.0f} % done, about {remaining} left",
    )


def check_writable(file: str | Path) -> None:
    """Find out before the measurement whether a result can be written; what is there stays.

    Raises:
        OSError: it cannot.
    """
    path = Path(file)
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def to_json(record: Mapping[str, Any]) -> str:
    """``record`` as one JSON object; what is no number there (infinity, NaN) is null."""
    # Python writes Infinity and NaN, which no other reader of JSON takes.
    plain = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def provenance(command: str) -> dict[str, Any]:
    """What a result file says about its origin; ``command`` is what made the figures."""
    import timm
    import torch

    machine = f"{os.cpu_count()} CPU cores, {_processor()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {
        **origin(command),
        "machine": machine,
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def origin(command: str) -> dict[str, str]:
    """What of ``provenance`` is known without torch."""
    return {
        "command": printable(command),
        **code_version(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name and kind."""
    name = platform.processor()
    info = Path("/proc/cpuinfo")  # Linux tells more there
    if info.exists():
        found = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        if found:
            name = found[1].strip()
    return f"{name} ({platform.machine()})"


def code_version() -> dict[str, str]:
    """Which code this is: the release, or in a checkout the commits.

    "commit" is that of HEAD, "+" after edits of the package; "code_last_changed_in" is the last one
    that changed the package.
    """
    from ... import __version__

    # The folder of an installed package can lie in somebody's repository, which does not know it.
    if not (shutil.which("git") and _git("ls-files", "--", ".")):
        return {"commit": f"release {__version__}"}
    edited = "+" if _git("status", "--porcelain", "--", ".") else ""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") + edited,
        "code_last_changed_in": _git("log", "-1", "--format=%h", "--", "."),
    }


def _git(*words: str) -> str:
    """What git says in the package's folder; nothing where it fails."""
    # The folder of the code, wherever the command was started.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parents[2]), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
