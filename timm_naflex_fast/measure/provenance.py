"""Where figures come from: command, commit, date, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from .output import printable


def provenance(command: str) -> dict[str, Any]:
    """What a result file says about its origin; ``command`` is what made the figures."""
    import timm
    import torch

    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else None
    cpu = f"{named[1].strip() if named else platform.processor()} ({platform.machine()})"
    machine = f"{os.cpu_count()} CPU cores, {cpu}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return dict(
        command=printable(command),
        commit=commit(),
        date=datetime.date.today().isoformat(),
        machine=machine,
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
    )


def commit() -> str:
    """The commit that last changed the package, "+" after edits; the release where it is no checkout."""
    from .. import __version__

    here = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words, "--", "."], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        last = git("log", "-1", "--format=%h")  # nothing, where git knows the folder but not the package
        return last + "+" * bool(git("status", "--porcelain")) if last else f"release {__version__}"
    except (OSError, subprocess.CalledProcessError):
        return f"release {__version__}"
