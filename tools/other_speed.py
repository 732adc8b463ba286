"""The tables on patch kernels and rotary tables, written from results/patch_embed/ and results/rope/."""

from __future__ import annotations

from pathlib import Path

from speed import Row, about_line, judged, number, read_json, run_bench

RESULTS = Path(__file__).resolve().parent.parent / "results"
PARTS = {
    "patch_embed": "--patch-embed --no-memory --budget 0.5",
    "rope": "--rope --batch 1 128 256 --budget 0.7 --patience 10",
}
BASELINE, FLOOR, BATCHED = "stock", "floor", "batched"
LARGE = ("32x32->16x16", "16x16->32x32", "16x16->48x48")


def measure(part: str) -> None:
    """Run one part's command and keep its figures."""
    run_bench(PARTS[part], RESULTS / part)


def races(part: str) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Per (workload, phase, batch) the contenders' rows."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in read_json(RESULTS / part / "bench.json")[0]:
        found.setdefault((row.workload, row.phase, row.batch), {})[row.contender] = row
    return found


def render_patch_embed() -> str:
    """Times faster than timm per kernel, layout and phase, with issue 2514's vmap form beside it."""
    measured = races("patch_embed")
    lines = [
        "| kernel (768, 3) | train | train, against the vmap form | a new size, whole call | a new size, its matrices "
        "| frozen weights, second call on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for workload in dict.fromkeys(workload for workload, _, _ in measured):
        large = workload.startswith(LARGE)

        def times(phase: str, ours: str = "matmul", theirs: str = BASELINE, workload: str = workload) -> float | None:
            rows = measured.get((workload, phase, 0), {})
            if ours not in rows or theirs not in rows:
                return None
            return rows[theirs].median_ms / rows[ours].median_ms

        cells = [
            judged(times("train"), 3 if large else 1.5, False),
            judged(times("2514", theirs="vmap"), 40 if large else None, False),
            judged(times("first"), 20 if large else None, False),
            judged(times("matrices"), None, False),
            judged(times("frozen", ours="matmul, kept"), 20 if large else None, False),
        ]
        lines.append(f"| {workload.replace('->', ' to ')} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", about_line([RESULTS / "patch_embed"], "patch_embed")])


def render_rope() -> str:
    """Milliseconds, ratios and peak memory per rotary type, phase and batch size."""
    lines = [
        "| type | batch | timm, ms | batched, ms | times faster | times the floor | peak memory over timm's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, phase, batch), rows in races("rope").items():
        ours, timm, floor = (rows.get(name) for name in (BATCHED, BASELINE, FLOOR))
        if ours is None:
            continue
        memory = (
            None if timm is None or not (ours.peak_bytes and timm.peak_bytes) else ours.peak_bytes / timm.peak_bytes
        )
        cells = [
            f"{kind}, {phase}",
            str(batch),
            "not run" if timm is None else number(timm.median_ms),
            number(ours.median_ms),
            judged(ours.times_faster, None if batch == 1 else 5, False),
            "-" if floor is None else number(ours.median_ms / floor.median_ms),
            "-" if memory is None else f"{memory:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", about_line([RESULTS / "rope"], "rope")])
