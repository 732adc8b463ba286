"""Where figures come from: command, date, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
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
        machine=machine,
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
    )


def _cpu() -> str:
    """The processor's name and architecture, e.g. "AMD EPYC (x86_64)"."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor()])[0]} ({platform.machine()})"
