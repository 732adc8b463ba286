"""What commands read, print and write: options, progress, files, and where figures come from."""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUIET_SECONDS = 10.0  # without a terminal, progress is printed this often


def positive(text: str) -> int:
    """An option's whole number; one below 1 is a ValueError, which argparse reports."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def printable(text: object) -> str:
    """Text on one line of a terminal: control characters, line ends and bytes that are no text
    become escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:.{2 if value >= 1 else 3}f}"
        if value < 10
        else f"{value:.1f}"
    )


def progress(what: str, total: float) -> Any:
    """A tqdm bar on stderr: call its ``update(parts)`` after some of the ``total`` parts of a long
    work."""
    from tqdm import tqdm

    often = 0.2 if sys.stderr.isatty() else QUIET_SECONDS
    look = "{desc}: {percentage:.0f} % done, about {remaining} left"
    total += 1e-6  # so that shares which round up do not leave less than no time
    return tqdm(
        desc=what,
        total=total,
        file=sys.stderr,
        mininterval=often,
        miniters=0,
        smoothing=0,
        bar_format=look,
    )


def check_writable(file: str | Path | None) -> None:
    """Find out before the measurement whether a result can be written; what is there stays.

    Raises:
        OSError: ``file`` cannot be written; names it.
    """
    if file is not None:
        new = not Path(file).exists()
        Path(file).open("ab").close()
        if new:
            Path(file).unlink()


def write_text(file: str | Path, text: str) -> None:
    """Write a file; bytes that are no text become escapes."""
    Path(file).write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(file: str | Path, record: Mapping[str, Any]) -> None:
    """Write ``record`` as one JSON object; what is no number there (infinity, NaN) is null."""
    plain = json.loads(json.dumps(record), parse_constant=lambda _: None)
    write_text(file, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def provenance(command: str) -> dict[str, Any]:
    """What a result file says about its origin; ``command`` is what made the figures."""
    import timm
    import torch

    info = Path("/proc/cpuinfo")
    named = (
        re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        if info.exists()
        else None
    )
    cpu = f"{named[1].strip() if named else platform.processor()} ({platform.machine()})"
    machine = f"{os.cpu_count()} CPU cores, {cpu}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    made = dict(
        command=printable(command),
        commit=commit(),
        date=datetime.date.today().isoformat(),
        machine=machine,
    )
    return made | dict(
        python=platform.python_version(), torch=torch.__version__, timm=timm.__version__
    )


def commit() -> str:
    """The commit that last changed the package, "+" after edits; the release where it is no
    checkout."""
    from .. import __version__

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *words, "--", "."]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    # Nothing, where git knows the folder but not the package.
    last = git("log", "-1", "--format=%h") if shutil.which("git") else ""
    return last + "+" * bool(git("status", "--porcelain")) if last else f"release {__version__}"
