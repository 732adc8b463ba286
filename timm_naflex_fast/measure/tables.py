"""What commands print and write: tables, progress, JSON files. rich draws where it is installed, else plain text."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
QUIET_SECONDS = 10.0  # without a terminal, progress prints a line this often


def print_table(headings: Sequence[str], lines: Sequence[Sequence[str]], width: int = 120) -> None:
    """Print ``lines`` of cells under ``headings``, the first column to the left, the others to the right.

    Args:
        headings: one per column.
        lines: cells as text, one per heading.
        width: columns of text used where the output is not a terminal, which has no width to ask for.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [headings, *lines]) for i in range(len(headings))]
        for line in [headings, *lines]:
            cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths)))
            print("  ".join(cells).rstrip())
        return
    table = Table()
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=i == 0)
    for line in lines:
        table.add_row(*line)
    console = Console()
    Console(width=None if console.is_terminal else width).print(table)


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 1 else 3}f}" if value < 10 else f"{value:.1f}"


def check_writable(file: str | Path | None = None, folder: str | Path | None = None) -> None:
    """Find out before anything is measured whether the results can be written; ``folder`` is made.

    Raises:
        OSError: ``file`` cannot be written, or ``folder`` cannot be made or written in; names it.
    """
    if file is not None:
        existed = Path(file).exists()
        with open(file, "ab"):
            pass
        if not existed:
            Path(file).unlink()
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_json(path: str | Path, record: dict[str, Any], indent: int = 1) -> None:
    """Write ``record`` as one JSON object."""
    Path(path).write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how much of some long work is done, on stderr; yields the function that is called after each part of it.

    A terminal shows a bar (with rich). Elsewhere a line appears every ten seconds.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        terminal = False
    else:
        terminal = (console := Console(stderr=True)).is_terminal
    if terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done, printed = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, printed
        done += 1
        if time.monotonic() - printed >= QUIET_SECONDS:
            printed = time.monotonic()
            print(f"{what}: {done} of {total} done", file=sys.stderr, flush=True)

    yield advance


def track(parts: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield from ``parts``, of which there are ``total``, and show the :func:`progress`."""
    with progress(what, total) as advance:
        for part in parts:
            yield part
            advance()
