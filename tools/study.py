"""The README's section on training: measured by examples/training_study.py, written from results/training_study/."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "training_study"
sys.path.append(str(ROOT / "examples"))

from training_report import conclusions, cross_table, draw, provenance_line, read  # noqa: E402


def redraw() -> None:
    """The pictures of docs/training.md, from the result files."""
    draw(RESULTS)


def render() -> str:
    """The accuracies, and where they come from."""
    record = read(RESULTS)
    return "\n".join([*cross_table(record), "", provenance_line(record)])


def render_conclusions() -> str:
    """What the study says, in sentences."""
    record = read(RESULTS)
    return "\n".join([*(f"- {sentence}" for sentence in conclusions(record)), "", provenance_line(record)])
