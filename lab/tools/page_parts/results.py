"""The result files, and a table with the origin of its figures."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "lab" / "results"
OURS = "matmul"
MODELS = ("model/base", "model/small")
ORIGIN = ("machine", "torch", "timm", "date", "commit")

Row = dict[str, Any]


def read(name: str) -> Row:
    """A result file."""
    record: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def table(
    headings: Sequence[str], lines: Iterable[Sequence[Any]], abouts: Sequence[Row], command: str
) -> str:
    """A table, where its figures come from, and the command that makes them again."""
    return f"{table_alone(headings, lines)}\n\n{origin(abouts)}; `{command}`."


def table_alone(headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """The table as GitHub reads it."""
    texts = [[str(value) for value in line] for line in lines]
    return tabulate(texts, headings, tablefmt="github", disable_numparse=True)


def origin(abouts: Sequence[Row]) -> str:
    """Where figures come from. Each fact is said once where the files agree."""
    facts = []
    for fact in ORIGIN:
        values = dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts)
        facts.append(" / ".join(values))
    machine, torch, timm, date, commit = facts
    return f"{machine}; torch {torch}, timm {timm}; {date}, commit {commit}"


def measured(headings: Sequence[str], lines: Iterable[Sequence[Any]], *names: str) -> str:
    """A table of figures of measure.py, from the result files of these names."""
    abouts = [read(name) for name in names]
    return table(headings, lines, abouts, f"uv run lab/benchmarks/measure.py {' '.join(names)}")


def rows_of(*names: str) -> list[Row]:
    """The rows of these result files."""
    rows = []
    for name in names:
        rows += read(name)["rows"]
    return rows
