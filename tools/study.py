"""The README's section on training: measured by examples/training_study.py, written from results/training_study/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "training_study"
sys.path.append(str(ROOT / "examples"))

from training_report import conclusions, cross_table, draw, provenance_line, read  # noqa: E402

PICTURES = {
    "losses.png": "Training loss under each strategy, and its difference from timm's own over the first steps",
    "fine_tuning.png": "Held-out accuracy while weights trained with antialiasing are fine-tuned with grid_sample",
}


def measure() -> None:
    """Train and evaluate it all again."""
    subprocess.run([sys.executable, str(ROOT / "examples" / "training_study.py")], check=True)


def redraw() -> None:
    """The section's pictures, from the result files."""
    draw(RESULTS)


def render() -> str:
    """The section between the markers ``training_study``."""
    record = read(RESULTS)
    pictures = [f"![{words}](results/training_study/{name})\n" for name, words in PICTURES.items()]
    lines = [*cross_table(record), "", *(f"- {sentence}" for sentence in conclusions(record)), ""]
    return "\n".join([*lines, *pictures, provenance_line(record)])
