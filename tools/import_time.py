"""What importing timm_naflex_fast costs after timm, in fresh processes: uv run tools/import_time.py [--out FILE]."""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "results" / "import_time.json"
TIMED = """
import time, torch, timm
start = time.perf_counter()
import timm_naflex_fast
print(torch.__version__, timm.__version__, 1000 * (time.perf_counter() - start))
"""


def main() -> None:
    """Measure, print, and keep the figures with the machine, versions and date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    # As installed: with bytecode, which the first run writes and which is not counted.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED]
    outs = [subprocess.check_output(command, env=environment, text=True).split() for _ in range(options.runs + 1)][1:]
    times = [float(out[-1]) for out in outs]
    record = {
        "command": "uv run tools/import_time.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": outs[0][0],
        "timm": outs[0][1],
        "python": platform.python_version(),
        "milliseconds": {"median": round(statistics.median(times), 1), "all": [round(t, 1) for t in times]},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["milliseconds"]))


if __name__ == "__main__":
    main()
