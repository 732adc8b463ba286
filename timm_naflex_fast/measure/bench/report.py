"""What came of the races: tables, losses, files. Rich where it is installed, plain text else."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .race import BASELINE, FLOOR, Race, Row

HEADINGS = (
    "contender",
    "median ms",
    f"times faster than {BASELINE}",
    f"times the {FLOOR}",
    "extra peak MB",
    "x size",
    "rounds",
)
KEY = ("suite", "workload", "phase", "batch", "dtype")


def key(race: Race | Row) -> tuple[Any, ...]:
    """What tells one race from another."""
    return tuple(getattr(race, name) for name in KEY)


def title(row: Race | Row) -> str:
    """A race in words, e.g. "pos_embed siglip train, B=64, float32: 16x16 bilinear, 51 grids, 15,000 tokens"."""
    about = row.about
    words = [f"{row.suite} {row.workload} {row.phase}", f"B={row.batch}" if row.batch else "", row.dtype]
    more = [str(about.get("table", "")), _count(about["grids"], "grid") if "grids" in about else ""]
    more += [f"{about['tokens']:,} tokens" if "tokens" in about else "", str(about.get("device", ""))]
    details = ", ".join(word for word in more if word)
    return ", ".join(word for word in words if word) + (f": {details}" if details else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, as text."""
    x_bytes = row.about.get("x_bytes")
    return (
        row.contender,
        number(row.median_ms),
        "-" if row.times_faster is None else number(row.times_faster),
        "-" if row.times_floor is None else number(row.times_floor),
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.1f}",
        "-" if row.peak_bytes is None or not x_bytes else f"{row.peak_bytes / x_bytes:.2f}",
        str(row.rounds),
    )


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 1 else 3}f}" if value < 10 else f"{value:.1f}"


def print_table(rows: list[Row]) -> None:
    """Print the rows of one race, and who was left out of it and why."""
    print(title(rows[0]))
    lines = [cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [HEADINGS, *lines]) for i in range(len(HEADINGS))]
        for line in [HEADINGS, *lines]:
            parts = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths)))
            print("  ".join(parts).rstrip())
    else:
        table = Table()
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i == 0)
        for line in lines:
            table.add_row(*line)
        console = Console()
        # A pipe has no width of its own; 80 columns would cut the table.
        Console(width=None if console.is_terminal else 120).print(table)
    print_left_out(rows[0])


def print_left_out(race: Race | Row) -> None:
    """Print who did not run and why, then an empty line."""
    for name, why in race.about.get("left_out", {}).items():
        print(f"not run: {name}, {why}")
    print(flush=True)


def losses(rows: Iterable[Row]) -> list[Row]:
    """The results of ours that are slower than the baseline, worst first."""
    lost = [row for row in rows if row.ours and row.times_faster is not None and row.times_faster < 1]
    return sorted(lost, key=lambda row: row.times_faster or 0)


def linearity(rows: Iterable[Row], small: int = 64, large: int = 256) -> list[tuple[Row, float]]:
    """Per contender and race that ran at both batch sizes: the larger one's row, and its time per token over the
    smaller one's. 1 is linear in tokens."""
    found = {(*key(row)[:3], row.batch, row.dtype, row.contender): row for row in rows}
    pairs = [(row, found.get((*key(row)[:3], small, row.dtype, row.contender))) for row in found.values()]
    return [
        (b, _per_token(b) / _per_token(a)) for b, a in pairs if b.batch == large and a is not None and _has_tokens(a)
    ]


def _has_tokens(row: Row) -> bool:
    return bool(row.about.get("tokens"))


def _per_token(row: Row) -> float:
    return row.median_ms / row.about["tokens"]


def summary(rows: list[Row]) -> list[str]:
    """The lines after the tables: losses or that there were none, and linearity."""
    compared = [row for row in rows if row.ours and row.times_faster is not None]
    lines = [
        f"slower than {BASELINE}: {row.contender}, {row.suite} {row.workload} {row.phase}, B={row.batch}, {row.dtype}: "
        f"{number(row.median_ms)} ms, {row.times_faster:.2f} x its speed"
        for row in losses(rows)
    ]
    if compared and not lines:
        lines.append(f"never slower than {BASELINE} in {len(compared)} comparisons")
    for row, ratio in linearity(rows):
        if row.contender in ("matmul", FLOOR):
            race = f"{row.suite} {row.workload} {row.phase}, {row.dtype}"
            lines.append(f"time per token at B=256 over B=64: {ratio:.2f} ({row.contender}, {race})")
    return lines


def provenance(command: str) -> dict[str, Any]:
    """Machine, versions, date and commit; ``command`` is what made the figures."""
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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name} ({platform.machine()})" if name else platform.machine()


def _commit() -> str | None:
    """The checkout this package runs from, "+" where its package was edited since; None outside of one."""
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("ls-files", "__init__.py") != "__init__.py":  # somebody else's repository around an installed package
            return None
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: str | Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write ``{**about, "rows": [...]}``."""
    record = {**about, "rows": [asdict(row) for row in rows]}
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows and the rest of a file that :func:`write_json` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Row(**row) for row in record.pop("rows")], record
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result file of naflex-fast bench: {error!r}") from error


def write_csv(path: str | Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write a line per row: its own columns, ``about.*`` ones, and machine, versions, date and commit on each."""
    extra = list(dict.fromkeys(name for row in rows for name in row.about))
    columns = [field.name for field in fields(Row) if field.name != "about"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *(f"about.{name}" for name in extra), *about])
        for row in rows:
            own = [getattr(row, name) for name in columns]
            writer.writerow(map(_cell, [*own, *(row.about.get(name) for name in extra), *about.values()]))


def _cell(value: Any) -> Any:
    """Floats in full, None as nothing, containers as JSON."""
    return "" if value is None else json.dumps(value) if isinstance(value, (bool, dict, list)) else value


def read_csv(path: str | Path) -> list[Row]:
    """The rows of a file that :func:`write_csv` wrote.

    Raises:
        ValueError: it is no such file.
    """
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    try:
        return [_row(line) for line in lines]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of naflex-fast bench: {error!r}") from error


def _row(line: dict[str, str]) -> Row:
    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    own = {field.name: line[field.name] for field in fields(Row) if field.name != "about"}
    words = {"suite", "workload", "phase", "dtype", "contender"}
    values: dict[str, Any] = {
        name: text if name in words else (value(text) if text else None) for name, text in own.items()
    }
    about = {name[6:]: value(text) for name, text in line.items() if name.startswith("about.") and text}
    return Row(**values, about=about)
