"""The result files, and a table with the origin of its figures."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "lab" / "results"
OURS = "matmul"
PLAIN_ADD = "plain-add"
MODELS = ("model/base", "model/small", "model/small_64")
ORIGIN = ("machine", "torch", "timm", "date", "commit")

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """A result file, in a list; an empty one where it is not there."""
    path = RESULTS / f"{name}.json"
    return [json.loads(path.read_text())] if path.exists() else []


def read_one(name: str) -> Row:
    """A result file that is there."""
    (record,) = read(name)
    return record


def table(
    headings: Sequence[str], lines: Iterable[Sequence[Any]], abouts: Sequence[Row], command: str
) -> str:
    """A table, where its figures come from, and the command that makes them again.

    Each fact of the origin is said once where the files agree.
    """
    if not abouts:
        return f"Not measured yet: `{command}`."
    texts = [[str(value) for value in line] for line in lines]
    text = tabulate(texts, headings, tablefmt="github", disable_numparse=True)
    origin = []
    for fact in ORIGIN:
        values = dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts)
        origin.append(" / ".join(values))
    machine, torch, timm, date, commit = origin
    return f"{text}\n\n{machine}; torch {torch}, timm {timm}; {date}, commit {commit}; `{command}`."


def measured(headings: Sequence[str], lines: Iterable[Sequence[Any]], *names: str) -> str:
    """A table of figures of measure.py, from the result files of these names."""
    abouts = []
    for name in names:
        abouts += read(name)
    return table(headings, lines, abouts, f"uv run lab/benchmarks/measure.py {' '.join(names)}")


def rows_of(*names: str) -> list[Row]:
    """The rows of these result files; none of a file that is not there."""
    rows = []
    for name in names:
        for record in read(name):
            rows += record["rows"]
    return rows
