"""Which mode to use on somebody's own images, said from measured figures."""

from __future__ import annotations

from .folder import Sizes
from .race import BASELINE, Row
from .report import number

EXACT = ("matmul", "interpolate_cached")
WORDS = {"train": "training", "infer": "inference while the table changes", "frozen": "inference with frozen weights"}


def advise(rows: list[Row], sizes: Sizes) -> str:
    """One sentence: the fastest mode that gives timm's own result in each phase measured, and by how much.

    Where a phase was measured more than once (batch sizes, dtypes), its largest batch in the first dtype speaks.

    Raises:
        ValueError: timm's own code or every exact mode is missing among the rows.
    """
    parts: dict[str, list[str]] = {}
    for phase in dict.fromkeys(row.phase for row in rows):
        race = _largest([row for row in rows if row.phase == phase])
        by_name = {row.contender: row for row in race}
        candidates = [by_name[name] for name in (BASELINE, *EXACT) if name in by_name]
        if BASELINE not in by_name or len(candidates) < 2:
            raise ValueError(f"advice needs {BASELINE} and one of {', '.join(EXACT)} among the contenders")
        best = min(candidates, key=lambda row: row.median_ms)
        why = f"{number(best.median_ms)} ms a batch of {best.batch}"
        if best.contender != BASELINE:
            why += f", {number(by_name[BASELINE].median_ms / best.median_ms)} times faster than timm's own code"
        sampled = by_name.get("grid_sample")
        if sampled and sampled.median_ms < best.median_ms:
            why += f"; grid_sample takes {number(sampled.median_ms)} ms, but its result is not timm's"
        parts.setdefault(best.contender, []).append(f"{WORDS.get(phase, phase)} ({why})")
    modes = [f"mode {name!r} for {' and '.join(phases)}" for name, phases in parts.items()]
    return (
        f"On these {len(sizes.grids):,} images ({sizes.distinct:,} distinct grids) use {', and '.join(modes)}: "
        "the fastest with timm's own result."
    )


def _largest(rows: list[Row]) -> list[Row]:
    batch = max(row.batch for row in rows)
    return [row for row in rows if row.batch == batch and row.dtype == rows[0].dtype]
