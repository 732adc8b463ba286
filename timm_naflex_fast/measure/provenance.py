"""Where figures come from: command, date, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any


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
        command=command,
        date=datetime.date.today().isoformat(),
        machine=machine,
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
    )
