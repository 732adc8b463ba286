"""The README's speed section: what is measured for it, and how it is written from results/speed/."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timm_naflex_fast.measure.bench.plot import time_over_batch, times_faster
from timm_naflex_fast.measure.bench.race import Row
from timm_naflex_fast.measure.bench.report import losses, number, read_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "speed"
FEW = "--contenders stock stock-bilinear interpolate_cached grid_sample matmul floor"
OVER_BATCH = (
    "--workload diverse --batch 1 4 16 64 128 256 --contenders stock stock-bilinear interpolate_cached matmul floor "
    "--patience 10 --no-memory --budget 0.7"
)

# Each part is one run of `naflex-fast bench`; ratios are only taken within a part.
PARTS = {
    "siglip": "--workload siglip",
    "diverse": "--workload diverse",
    "others": f"--workload single imagenet extreme {FEW}",
    "radio": f"--workload radio --phase infer frozen {FEW} --budget 1",
    "radio_train": f"--workload radio --phase train {FEW} --no-memory --budget 1",
    "small": "--batch 1 16 --phase infer train --contenders stock interpolate_cached matmul floor "
    "--no-memory --budget 0.4",
    "batches_train": f"--phase train {OVER_BATCH}",
    "batches_infer": f"--phase infer {OVER_BATCH}",
    "linear": "--workload siglip diverse --batch 64 256 --together --phase infer train "
    "--contenders matmul floor --no-memory",
    "bfloat16": "--workload siglip diverse --dtype bfloat16 --phase infer train "
    "--contenders stock stock-bilinear matmul floor --budget 1",
}


def measure(part: str) -> None:
    """Run one part's command and keep its figures."""
    run_bench(PARTS[part], RESULTS / part)


def run_bench(options: str, out: Path) -> None:
    """``naflex-fast bench`` with these options, its figures kept in the folder ``out``."""
    command = [sys.executable, "-m", "timm_naflex_fast", "bench", *options.split(), "--out", str(out.relative_to(ROOT))]
    subprocess.run(command, check=True, cwd=ROOT)


def rows(*parts: str) -> list[Row]:
    """The rows of the parts that were measured, one after another."""
    return [row for part in parts if (RESULTS / part).is_dir() for row in read_json(RESULTS / part / "bench.json")[0]]


def render() -> str:
    """Every target and every loss."""
    return "\n".join([*_targets(), "", *_never_slower(), "", _provenance()])


def render_short() -> str:
    """One line per workload."""
    measured = rows("siglip", "diverse", "others", "radio", "radio_train")
    lines = [
        "| workload | train, times faster than timm | than timm's grid_sample | times the floor "
        "| infer, times faster than timm | infer with a frozen table |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for workload in dict.fromkeys(row.workload for row in measured):
        races = (("train", "stock"), ("train", "stock-bilinear"), ("train", "floor"), ("infer", "stock"))
        ratios = [_ratio(measured, workload, *race) for race in (*races, ("frozen", "stock"))]
        lines.append(f"| {workload} | {' | '.join(judged(ratio, None, False) for ratio in ratios)} |")
    return "\n".join([*lines, "", _provenance()])


def draw() -> None:
    """The section's two pictures, from the result files."""
    over_batch = rows("batches_train", "batches_infer")
    if over_batch:
        time_over_batch(over_batch, RESULTS / "time_over_batch.png")
    compared = [
        row for row in rows("siglip", "diverse", "others", "radio", "radio_train") if row.contender in FEW.split()
    ]
    if compared:
        times_faster(compared, RESULTS / "times_faster.png")


# what, phase, contender to compare with, at least (more is better) or at most, per workload
TARGETS = (
    ("train, times faster than timm", "train", "stock", {"siglip": 40, "diverse": 150}),
    ("train, times faster than timm's grid_sample bilinear", "train", "stock-bilinear", {"siglip": 6, "diverse": 6}),
    ("train, times the floor", "train", "floor", {"siglip": 1.5, "diverse": 2.0}),
    (
        "infer with a table that changes each call, times faster than timm",
        "infer",
        "stock",
        {"siglip": 4, "diverse": 4},
    ),
    ("infer, times the floor", "infer", "floor", {"siglip": 1.5, "diverse": 2.0}),
    ("infer with a frozen table, times the floor", "frozen", "floor", {"siglip": 1.2, "diverse": 1.2}),
)


def _targets() -> list[str]:
    measured = rows("siglip", "diverse")
    lines = ["| `matmul`, B=64, C=768, float32 | siglip | diverse |", "| --- | --- | --- |"]
    for what, phase, other, bounds in TARGETS:
        texts = []
        for workload, bound in bounds.items():
            ratio = _ratio(measured, workload, phase, other)
            at_most = other == "floor"
            texts.append(judged(ratio, bound, at_most))
        lines.append(f"| {what} | {' | '.join(texts)} |")
    lines.append(f"| train, time per token at B=256 over B=64 | {_each(_linear, 1.15)} |")
    lines.append(f"| train, extra peak memory over the size of `x` | {_each(_memory, 1.15)} |")
    half = rows("bfloat16")
    for what, phase, other, bounds in TARGETS[:5]:
        ratios = {workload: _ratio(half, workload, phase, other) for workload in bounds}
        texts = (judged(ratio, bounds[workload], other == "floor") for workload, ratio in ratios.items())
        lines.append(f"| bfloat16 `x`: {what} | {' | '.join(texts)} |")
    return lines


def judged(value: float | None, bound: float | None, at_most: bool) -> str:
    """A figure beside its target, where it has one."""
    if value is None:
        return "not measured"
    if bound is None:
        return number(value)
    reached = value <= bound if at_most else value >= bound
    return f"{number(value)} (target {'<=' if at_most else '>='} {bound:g}{'' if reached else ', **missed**'})"


def _each(measure: Callable[[str], float | None], bound: float) -> str:
    return " | ".join(judged(measure(workload), bound, True) for workload in ("siglip", "diverse"))


def _find(measured: list[Row], contender: str, **key: object) -> Row | None:
    for row in measured:
        if row.contender == contender and all(getattr(row, name) == value for name, value in key.items()):
            return row
    return None


def _ratio(measured: list[Row], workload: str, phase: str, other: str) -> float | None:
    """How many times faster matmul is than ``other``; of the floor, how many times slower."""
    key = dict(workload=workload, phase=phase, batch=64)
    ours, theirs = _find(measured, "matmul", **key), _find(measured, other, **key)
    if ours is None or theirs is None:
        return None
    return ours.median_ms / theirs.median_ms if other == "floor" else theirs.median_ms / ours.median_ms


def _linear(workload: str) -> float | None:
    small, large = (_find(rows("linear"), "matmul", workload=workload, phase="train", batch=b) for b in (64, 256))
    if small is None or large is None:
        return None
    return (large.median_ms / large.about["tokens"]) / (small.median_ms / small.about["tokens"])


def _memory(workload: str) -> float | None:
    row = _find(rows("siglip", "diverse"), "matmul", workload=workload, phase="train", batch=64)
    return None if row is None or row.peak_bytes is None else row.peak_bytes / row.about["x_bytes"]


def _never_slower() -> list[str]:
    """matmul against timm on everything measured, each loss by name."""
    measured = rows(*(part for part in PARTS if not part.startswith("batches")))
    ours = [row for row in measured if row.contender == "matmul" and row.times_faster is not None]
    if not ours:
        return ["Not measured yet."]
    worst = min(ours, key=lambda row: row.times_faster or 0)
    batches = ", ".join(str(batch) for batch in sorted({row.batch for row in ours}))
    lines = [
        f"In {len(ours)} comparisons with timm's own code ({len({row.workload for row in ours})} workloads, batches of "
        f"{batches}), `matmul` is at worst {worst.times_faster:.2f} times as fast: {worst.workload}, {worst.phase}, "
        f"B={worst.batch}, {worst.dtype}."
    ]
    lost = sorted(losses(measured), key=lambda row: (row.contender != "matmul", row.times_faster))
    if lost:
        lines += ["", "Where a strategy of this package is slower than timm's own code:", ""]
        lines += ["| strategy | work | times as fast |", "| --- | --- | --- |"]
    for row in lost:
        work = f"{row.workload}, {row.phase}, B={row.batch}, {row.dtype}"
        lines.append(f"| `{row.contender}` | {work} | {row.times_faster:.2f} |")
    return lines


def _provenance() -> str:
    return about_line([RESULTS / part for part in PARTS if (RESULTS / part).is_dir()], "speed")


def about_line(folders: list[Path], part: str) -> str:
    """Machine, versions and dates of result folders, once where they agree, and the command that made them."""
    abouts = [read_json(folder / "bench.json")[1] for folder in folders]

    def each(key: str) -> str:
        return " / ".join(dict.fromkeys(str(about[key]) for about in abouts))

    return (
        f"{each('machine')}; torch {each('torch')}, timm {each('timm')}; {each('date')}, commit {each('commit')}; "
        f"medians, contenders in turns; `uv run tools/update_readme.py --measure {part}`."
    )
