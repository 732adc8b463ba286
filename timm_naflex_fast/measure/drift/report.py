"""Show drift: a table on the terminal, a JSON file, a progress bar; rich where it is installed, plain text else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from .measure import Drift

T = TypeVar("T")
HEADINGS = (
    "strategy",
    "embed max abs",
    "embed rel RMS",
    "pooled cosine dist",
    "same neighbour",
    "agreement",
    "accuracy",
)


def track(batches: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield from ``batches`` under a progress bar (on a terminal with rich; silently otherwise)."""
    try:
        from rich.console import Console
        from rich.progress import track as bar
    except ImportError:
        yield from batches
        return
    yield from bar(batches, description=description, total=total, console=Console(stderr=True), transient=True)


def rows(results: dict[str, Drift]) -> list[tuple[str, ...]]:
    """The table's cells as text, a row per strategy."""
    return [
        (
            name,
            f"{drift.embed_max_abs:.2e}",
            f"{drift.embed_rel_rms:.2e}",
            f"{drift.pooled_cosine_distance:.2e}",
            f"{drift.neighbours:.2%}",
            f"{drift.agreement:.2%}",
            "-" if drift.accuracy is None else f"{drift.accuracy:.2%}",
        )
        for name, drift in results.items()
    ]


def print_table(results: dict[str, Drift], *, model: str, weights: str, images: int, baseline: str = "stock") -> None:
    """Print the drift table under a title that names the model, its weights and the number of images."""
    origin = "timm's own result" if baseline == "stock" else baseline
    title = f"Drift from {origin}: {model}; weights: {weights}; {images:,} images"
    cells = rows(results)
    print(title)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [HEADINGS, *cells]) for i in range(len(HEADINGS))]
        for row in [HEADINGS, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        return
    table = Table()
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    console = Console()
    # A pipe has no width of its own; 80 columns would cut the table.
    Console(width=None if console.is_terminal else 130).print(table)


def write_json(path: str | Path, results: dict[str, Drift], *, model: str, weights: str, images: int) -> None:
    """Write ``{"model", "weights", "images", "strategies": {name: drift}}``."""
    report = dict(model=model, weights=weights, images=images)
    strategies = {name: asdict(drift) for name, drift in results.items()}
    Path(path).write_text(json.dumps({**report, "strategies": strategies}, indent=2) + "\n", encoding="utf-8")
