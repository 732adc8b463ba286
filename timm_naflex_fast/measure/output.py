"""What commands read, print and write: numbers, tables, progress, JSON files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QUIET_SECONDS = 10.0  # progress prints a line this often


def positive(text: str) -> int:
    """An option's whole number; below 1 it is a ValueError, which argparse reports."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print ``lines`` of cells under ``headings``, the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [headings, *lines]) for i in range(len(headings))]
    for line in [headings, *lines]:
        cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths)))
        print("  ".join(cells).rstrip())


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 1 else 3}f}" if value < 10 else f"{value:.1f}"


def check_writable(file: str | Path | None) -> None:
    """Find out before the measurement whether the results can be written.

    Raises:
        OSError: ``file`` cannot be written; names it.
    """
    if file is not None and (not os.access(Path(file).parent, os.W_OK) or Path(file).is_dir()):
        raise OSError(f"{file} cannot be written")


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Write ``record`` as one JSON object."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def progress(what: str, total: int) -> Callable[[], None]:
    """Returns the function to call after each part of some long work of ``total`` parts.

    It prints to stderr every ten seconds how much is done and how long the rest takes; if the first part shows that
    the work is long, at once.
    """
    done, started = 0, time.monotonic()
    printed = started

    def advance() -> None:
        nonlocal done, printed
        done, now = done + 1, time.monotonic()
        left = (now - started) / done * (total - done)
        if now - printed >= QUIET_SECONDS or (done == 1 and left >= QUIET_SECONDS):
            printed = now
            print(f"{what}: {done} of {total} done, about {left / 60:.1f} minutes left", file=sys.stderr, flush=True)

    return advance
