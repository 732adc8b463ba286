"""Results of races: tables, sentences, the result file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import tables
from ..contenders import BASELINE
from ..tables import number
from .race import Race, Row

EXACT = ("matmul", "interpolate_cached")
PHASE_WORDS = {
    "train": "training",
    "infer": "inference while the table changes",
    "frozen": "inference with frozen weights",
}


def title(race: Race | Row) -> str:
    """A race in words, e.g. "pos_embed siglip train, B=64, float32: 16x16 bilinear, 51 grids, 15,000 tokens"."""
    about = race.about
    words = [f"{race.suite} {race.workload} {race.phase}", f"B={race.batch}" if race.batch else "", race.dtype]
    more = [about.get("model"), about.get("table")]
    more += [f"{about[key]:,} {key}" for key in ("grids", "tokens") if key in about] + [about.get("device")]
    return ": ".join(", ".join(filter(None, part)) for part in (words, more) if any(part))


def _cells(row: Row) -> dict[str, str]:
    """A row of the table: text by heading, "-" where there is no figure."""
    x_bytes, share = row.about.get("x_bytes"), row.about.get("embeds_share", {}).get(row.contender)
    size, faster, plain = row.peak_bytes, row.times_faster, row.times_plain_add
    return {
        "contender": row.contender,
        "median ms": number(row.median_ms),
        f"times faster than {BASELINE}": "-" if faster is None else number(faster),
        "times one plain add": "-" if plain is None else number(plain),
        "share of embeddings": "-" if share is None else f"{100 * share:.1f} %",
        "extra peak MB": "-" if size is None else f"{size / 1e6:,.1f}",
        "x size": "-" if size is None or not x_bytes else f"{size / x_bytes:.2f}",
        "rounds": str(row.rounds),
    }


def print_race(rows: list[Row], race: Race | None = None) -> None:
    """Print the rows of one race, without columns that have no figure; then who did not run and why."""
    about = race or rows[0]
    print(title(about))
    if rows:
        lines = [_cells(row) for row in rows]
        headings = [heading for heading in lines[0] if any(line[heading] != "-" for line in lines)]
        tables.print_table(headings, [[line[heading] for heading in headings] for line in lines])
    for name, why in about.about.get("left_out", {}).items():
        print(f"not run: {name}, {why}")
    print(flush=True)


def advise(rows: list[Row], grids: list[tuple[int, int]]) -> str:
    """One sentence: the fastest mode with timm's own result in each phase measured, and by how much.

    Of several batch sizes and dtypes in a phase, the largest batch in the first dtype counts.

    Raises:
        ValueError: timm's own code or every exact mode is missing among the rows.
    """
    parts = []
    for phase in dict.fromkeys(row.phase for row in rows):
        here = [row for row in rows if row.phase == phase]
        batch, dtype = max(row.batch for row in here), here[0].dtype
        race = {row.contender: row for row in here if (row.batch, row.dtype) == (batch, dtype)}
        candidates = [race[name] for name in (BASELINE, *EXACT) if name in race]
        if BASELINE not in race or len(candidates) < 2:
            raise ValueError(f"advice needs {BASELINE} and one of {', '.join(EXACT)} among the contenders")
        best = min(candidates, key=lambda row: row.median_ms)
        why = f"{number(best.median_ms)} ms a batch of {batch}"
        if best.contender != BASELINE:
            why += f", {number(race[BASELINE].median_ms / best.median_ms)} times faster than timm's own code"
        parts.append(f"mode {best.contender!r} for {PHASE_WORDS[phase]} ({why})")
    return (
        f"On these {len(grids):,} images ({len(set(grids)):,} distinct grids) use {', and '.join(parts)}: "
        "the fastest with timm's own result."
    )


def write_json(path: str | Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Write ``{**about, "rows": [...]}``."""
    tables.write_json(path, {**about, "rows": [asdict(row) for row in rows]})


def read_json(path: str | Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows and the rest of a file that :func:`write_json` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Row(**row) for row in record.pop("rows")], record
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result file of naflex-fast bench: {error!r}") from error
