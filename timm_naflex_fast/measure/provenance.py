"""Where figures come from: command, date, commit, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance(command: str) -> dict[str, Any]:
    """What a result file says about its origin; ``command`` is what made the figures."""
    import timm
    import torch

    machine = f"{os.cpu_count()} CPU cores, {_cpu()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return dict(
        command=command,
        date=datetime.date.today().isoformat(),
        commit=_commit(),
        machine=machine,
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
    )


def _cpu() -> str:
    """The processor's name and architecture, e.g. "AMD EPYC (x86_64)"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name} ({platform.machine()})" if name else platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, "+" after edits in the package; None without one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("ls-files", "__init__.py") != "__init__.py":  # an installed package inside another repository
            return None
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return None
