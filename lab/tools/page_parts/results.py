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
ORIGIN = ("machine", "torch", "timm", "date", "commit")

Row = dict[str, Any]


def read(pattern: str) -> list[Row]:
    """The result files that exist, each with its name under "again"."""
    records = []
    for path in sorted(RESULTS.glob(f"{pattern}.json")):
        name = str(path.relative_to(RESULTS).with_suffix(""))
        records.append({**json.loads(path.read_text()), "again": name})
    return records


def read_one(name: str) -> Row:
    """One result file."""
    (record,) = read(name)
    return record


def table(
    headings: Sequence[str], lines: Iterable[Sequence[Any]], abouts: Sequence[Row], command: str
) -> str:
    """A table, where its figures come from, and the command that makes them again.

    Each fact of the origin is said once where the files agree.
    """
    texts = [[str(value) for value in line] for line in lines]
    text = tabulate(texts, headings, tablefmt="github", disable_numparse=True)
    origin = []
    for fact in ORIGIN:
        values = dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts)
        origin.append(" / ".join(values))
    machine, torch, timm, date, commit = origin
    return f"{text}\n\n{machine}; torch {torch}, timm {timm}; {date}, commit {commit}; `{command}`."


def measure_again(abouts: Sequence[Row]) -> str:
    """The command that measures result files again."""
    return f"uv run lab/benchmarks/measure.py {' '.join(about['again'] for about in abouts)}"
