"""The tables on speed in the README and docs/, written from the files that benchmarks/measure.py leaves in results/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from timm_naflex_fast.measure.bench.race import BASELINE, PLAIN_ADD, Row
from timm_naflex_fast.measure.output import number

RESULTS = Path(__file__).resolve().parent.parent / "results"
NOT_MEASURED = "Not measured yet."
FLAG = "timm-flag-bilinear"
TARGETED, OTHERS = ("speed/siglip", "speed/diverse"), ("speed/others", "speed/radio", "speed/radio_train")
MODES = (BASELINE, "grid_sample", "interpolate_cached", "matmul", PLAIN_ADD)


def files(*patterns: str) -> list[Path]:
    """The result files that exist, in the order of the patterns; without ".json"."""
    return [path for pattern in patterns for path in sorted(RESULTS.glob(f"{pattern}.json"))]


def rows(*patterns: str) -> list[Row]:
    """The rows of the result files that exist."""
    return [Row(**row) for path in files(*patterns) for row in json.loads(path.read_text())["rows"]]


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    table = [headings, ["---"] * len(headings), *lines]
    return [f"| {' | '.join(line)} |" for line in table]


def origin(*patterns: str) -> str:
    """Machine, versions, date and commit of result files, once where they agree, and the command that made them."""
    abouts = [json.loads(path.read_text()) for path in files(*patterns)]

    def each(key: str) -> str:
        return " / ".join(dict.fromkeys(str(about.get(key)) for about in abouts))

    names = " ".join(str(path.relative_to(RESULTS).with_suffix("")) for path in files(*patterns))
    return (
        f"{each('machine')}; torch {each('torch')}, timm {each('timm')}; {each('date')}, commit {each('commit')}; "
        f"`uv run benchmarks/measure.py {names}`."
    )


def section(lines: list[str], *patterns: str) -> str:
    """The lines of a table and the line on its origin, or that nothing was measured."""
    return "\n".join([*lines, "", origin(*patterns)]) if files(*patterns) else NOT_MEASURED


def find(measured: Iterable[Row], contender: str, **key: object) -> Row | None:
    """The row of a contender with these values."""
    for row in measured:
        if row.contender == contender and all(getattr(row, name) == value for name, value in key.items()):
            return row
    return None


def ratio(measured: list[Row], other: str, ours: str = "matmul", **key: object) -> float | None:
    """How many times faster ours is than ``other``; of the plain add, how many times slower."""
    own, theirs = find(measured, ours, **key), find(measured, other, **key)
    if own is None or theirs is None:
        return None
    return own.median_ms / theirs.median_ms if other == PLAIN_ADD else theirs.median_ms / own.median_ms


def judged(value: float | None, bound: float | None = None, at_most: bool = False) -> str:
    """A figure beside its target, where it has one."""
    if value is None:
        return "not measured"
    if bound is None:
        return number(value)
    reached = value <= bound if at_most else value >= bound
    return f"{number(value)} (target {'<=' if at_most else '>='} {bound:g}{'' if reached else ', **missed**'})"


def render_short() -> str:
    """The two main workloads, under both heaps; the kept one first, because its ratios are the smaller ones."""
    measured = rows("heap")
    largest = max((row.batch for row in measured), default=0)
    lines = []
    for workload in ("siglip", "diverse"):
        cells = [workload]
        for phase, others in (("train", (BASELINE, FLAG, PLAIN_ADD)), ("infer", (BASELINE, PLAIN_ADD))):
            for other in others:
                kept, default = (_under_heap(heap, other, workload, phase, largest) for heap in ("kept", "default"))
                cells.append(judged(kept) if other != BASELINE else f"{judged(kept)} / {judged(default)}")
        lines.append(cells)
    headings = ["times faster", "train, than timm", "than timm's grid_sample", "times one plain add"]
    headings += ["infer, than timm", "times one plain add"]
    return section(markdown(headings, lines), "heap")


def _under_heap(heap: str, other: str, workload: str, phase: str, batch: int) -> float | None:
    here = [row for row in rows("heap") if row.about["heap"] == heap]
    return ratio(here, other, workload=workload, phase=phase, batch=batch)


# what, phase, contender to compare with, target per workload: at least, or of the plain add at most
TARGETS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("train, times faster than timm", "train", BASELINE, {"siglip": 40, "diverse": 150}),
    ("train, times faster than timm's grid_sample bilinear", "train", FLAG, {"siglip": 6, "diverse": 6}),
    ("train, times one plain add", "train", PLAIN_ADD, {"siglip": 1.5, "diverse": 2.0}),
    ("infer with a table that changes, times faster than timm", "infer", BASELINE, {"siglip": 4, "diverse": 4}),
    ("infer, times one plain add", "infer", PLAIN_ADD, {"siglip": 1.5, "diverse": 2.0}),
    ("infer with a frozen table, times one plain add", "frozen", PLAIN_ADD, {"siglip": 1.2, "diverse": 1.2}),
)


def render_targets() -> str:
    """Every target and every loss."""
    lines = []
    for title, part in (("", TARGETED), ("bfloat16 `x`: ", ("speed/bfloat16",))):
        measured = rows(*part)
        for what, phase, other, bounds in TARGETS[: 5 if title else None]:
            found = {name: ratio(measured, other, workload=name, phase=phase) for name in bounds}
            cells = (judged(value, bounds[name], other == PLAIN_ADD) for name, value in found.items())
            lines.append([title + what, *cells])
    memory = [_memory(workload) for workload in ("siglip", "diverse")]
    if any(memory):
        lines.append(
            ["train, extra peak memory over the size of `x`", *(judged(value, 1.15, True) for value in memory)]
        )
    table = markdown(["`matmul`, B=64, C=768, float32", "siglip", "diverse"], lines)
    return section([*table, "", *_losses()], "speed/*")


def _memory(workload: str) -> float | None:
    row = find(rows(*TARGETED), "matmul", workload=workload, phase="train", batch=64)
    return None if row is None or row.peak_bytes is None else row.peak_bytes / row.about["x_bytes"]


def _losses() -> list[str]:
    """matmul against timm on everything measured, and each loss by name."""
    measured = [row for row in rows("speed/*") if row.times_faster is not None]
    ours = [row for row in measured if row.contender == "matmul"]
    if not ours:
        return []
    worst = min(ours, key=lambda row: row.times_faster or 0)
    batches = ", ".join(map(str, sorted({row.batch for row in ours})))
    lines = [
        f"In {len(ours)} comparisons with timm's own code ({len({row.workload for row in ours})} workloads, batches of "
        f"{batches}), `matmul` is at worst {worst.times_faster:.2f} times as fast: {worst.workload}, {worst.phase}, "
        f"B={worst.batch}, {worst.dtype}."
    ]
    losses = [row for row in measured if row.ours and row.times_faster < 1]
    lost = sorted(losses, key=lambda row: (row.contender != "matmul", row.times_faster))
    if not lost:
        return lines
    table = (
        [f"`{row.contender}`", f"{row.workload}, {row.phase}, B={row.batch}, {row.dtype}", f"{row.times_faster:.2f}"]
        for row in lost
    )
    lines += ["", "Where a strategy of this package is slower than timm's own code:", ""]
    return lines + markdown(["strategy", "work", "times as fast"], table)


def render_model() -> str:
    """Whole models: a step of timm's, a step of ours, what is saved, and the embeddings' share of both."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows("model/*"):
        key = row.about["model"], row.workload, row.batch, row.phase, row.dtype
        found.setdefault(key, {})[row.contender] = row
    lines = []
    for (model, workload, batch, phase, dtype), by_name in found.items():
        stock, ours = by_name[BASELINE], by_name["matmul"]
        shares = stock.about["embeds_share"]
        lines.append(
            [f"{model}, {workload}, B={batch}", f"{phase}, {dtype}", number(stock.median_ms), number(ours.median_ms)]
            + [f"{100 * (1 - ours.median_ms / stock.median_ms):.1f} %"]
            + [f"{100 * (stock.spread or 0):.1f} %"]
            + [f"{100 * shares[name]:.1f} %" for name in (BASELINE, "matmul")]
        )
    headings = ["model", "step", "timm, ms", "`matmul`, ms", "saved", "timm's rounds differ by"]
    headings += ["embeddings' share, timm", "`matmul`"]
    return section(markdown(headings, lines), "model/*")


def render_model_short() -> str:
    """What a whole step saves in percent, and by how much rounds of the same code differ."""
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in rows("model/*"):
        if row.ours and row.times_faster:
            saved = f"{100 * (1 - 1 / row.times_faster):.1f}±{100 * (row.spread or 0):.0f}"
            found.setdefault((row.about["model"], row.workload), {})[row.phase, row.batch] = saved
    steps = [(phase, batch) for phase in ("train", "infer") for batch in (8, 64)]
    lines = [[*names, *(saved.get(step, "-") for step in steps)] for names, saved in sorted(found.items())]
    headings = ["`matmul` saves, %", "grids", "training step, B=8", "B=64", "inference, B=8", "B=64"]
    return section(markdown(headings, lines), "model/*")


def render_heap() -> str:
    """Times faster than timm under both heaps, side by side."""
    measured = rows("heap")
    lines = []
    for workload, phase, batch in dict.fromkeys((row.workload, row.phase, row.batch) for row in measured):
        key = workload, phase, batch
        cells = [judged(_under_heap(heap, other, *key)) for other in (BASELINE, FLAG) for heap in ("kept", "default")]
        lines.append([f"{workload}, {phase}, B={batch}", *cells])
    headings = ["`matmul`, times faster than", "timm, heap kept", "timm, glibc's default"]
    headings += ["timm's grid_sample, heap kept", "glibc's default"]
    return section(markdown(headings, lines), "heap")


def render_counts() -> str:
    """Bytes, operators and host waits of a step."""
    if not files("counts"):
        return NOT_MEASURED
    record = json.loads((RESULTS / "counts.json").read_text())
    races: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in record["rows"]:
        key = row["workload"], row["phase"], row["batch"], row["grids"]
        races.setdefault(key, {})[row["contender"]] = row
    lines = []
    for (workload, phase, batch, grids), by_name in races.items():
        for name in (name for name in MODES if name in by_name):
            row = by_name[name]
            plain = row["memory"] / by_name[PLAIN_ADD]["memory"]
            cells = [number((row["read"] + row["written"]) / 1e9), number(row["memory"] / 1e9), number(plain)]
            cells += [f"{row['operators']:,}", f"{row['host_waits']:,}", f"{row['whole_writes']:,}"]
            lines.append([f"{workload}, {phase}, B={batch}, {grids} grids", f"`{name}`", *cells])
    headings = ["step", "contender", "GB that operators touch", "GB of memory", "times one plain add", "operators"]
    return section(markdown([*headings, "host waits", "copies as large as `x`"], lines), "counts")


def render_counts_short() -> str:
    """Memory, host waits and copies of the gradient in one training step of many images."""
    if not files("counts"):
        return NOT_MEASURED
    found = json.loads((RESULTS / "counts.json").read_text())["rows"]
    largest = max(row["batch"] for row in found)
    lines = []
    for row in found:
        if (row["workload"], row["phase"], row["batch"]) == ("diverse", "train", largest) and row["contender"] in (
            BASELINE,
            "matmul",
            PLAIN_ADD,
        ):
            cells = [number(row["memory"] / 1e9), f"{row['host_waits']:,}", f"{row['whole_writes']:,}"]
            lines.append([f"`{row['contender']}`", *cells])
    headings = [f"diverse, B={largest}, C=768", "GB of memory", "host waits", "copies as large as `x`"]
    return "\n".join(markdown(headings, lines))


def render_patch_kernels() -> str:
    """Times faster than timm per kernel, layout and phase, with issue 2514's vmap form beside it."""
    measured = rows("patch_kernels")
    large = ("32x32->16x16", "16x16->32x32", "16x16->48x48")
    lines = []
    for workload in dict.fromkeys(row.workload for row in measured):
        big = workload.startswith(large)
        bounds = {("train", BASELINE): 3 if big else 1.5, ("train", "issue-2514-vmap"): 40 if big else None}
        bounds |= {("first", BASELINE): 20 if big else None, ("frozen", BASELINE): 20 if big else None}
        cells = (
            judged(ratio(measured, other, workload=workload, phase=phase), bound)
            for (phase, other), bound in bounds.items()
        )
        lines.append([workload.replace("->", " to "), *cells])
    headings = ["kernel (768, 3)", "train", "train, against the vmap form", "a new size"]
    return section(markdown([*headings, "frozen weights, second call on"], lines), "patch_kernels")


def render_rope() -> str:
    """Milliseconds, ratios and peak memory per rotary type, phase and batch size."""
    races: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows("rope"):
        races.setdefault((row.workload, row.phase, row.batch), {})[row.contender] = row
    lines = []
    for (kind, phase, batch), by_name in races.items():
        ours, timm, plain = (by_name.get(name) for name in ("batched", BASELINE, PLAIN_ADD))
        if ours is None:
            continue
        memory = timm and timm.peak_bytes and ours.peak_bytes and ours.peak_bytes / timm.peak_bytes
        cells = ["not run" if timm is None else number(timm.median_ms), number(ours.median_ms)]
        cells += [judged(ours.times_faster, None if batch == 1 else 5)]
        cells += ["-" if plain is None else number(ours.median_ms / plain.median_ms)]
        lines.append([f"{kind}, {phase}", str(batch), *cells, f"{memory:.2f}" if memory else "-"])
    headings = ["type", "batch", "timm, ms", "batched, ms", "times faster", "times one plain add"]
    return section(markdown([*headings, "peak memory over timm's"], lines), "rope")


def render_gpu() -> str:
    """``matmul`` on a GPU: against one plain add and against timm."""
    measured = rows("gpu/*")
    lines = []
    for key in dict.fromkeys((row.workload, row.dtype, row.phase, row.batch) for row in measured):
        work = dict(zip(("workload", "dtype", "phase", "batch"), key))
        faster, plain = ratio(measured, BASELINE, **work), ratio(measured, PLAIN_ADD, **work)
        words = "{}, {}, {}, B={}".format(*key)
        lines.append([words, judged(plain, 1.3 if key[2] == "infer" else 1.5, True), judged(faster)])
    if not lines:
        return "Not measured: no GPU was available."
    return section(markdown(["`matmul`, C=768", "times one plain add", "times faster than timm"], lines), "gpu/*")
