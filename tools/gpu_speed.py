"""What is measured on a GPU, and how it is written from results/gpu/."""

from __future__ import annotations

from speed import ROOT, judged, run_bench

from timm_naflex_fast.measure.bench.report import number, read_json

RESULTS = ROOT / "results" / "gpu"
OPTIONS = (
    "--device cuda --batch 512 --phase infer train --contenders stock stock-bilinear interpolate_cached matmul floor "
    "--rounds 100 --budget 4"
)
PARTS = {
    f"{workload}_{dtype}": f"--workload {workload} --dtype {dtype} {OPTIONS}"
    for workload in ("diverse", "siglip")
    for dtype in ("float32", "bfloat16")
}


def measure() -> None:
    """Run every part and keep its figures."""
    for part, options in PARTS.items():
        run_bench(options, RESULTS / part)


# phase, contender to compare with, bound; at most of the floor, at least of the others
TARGETS = (
    ("infer", "floor", 1.3, "forward, times the floor"),
    ("train", "floor", 1.5, "forward and backward, times the floor"),
    ("train", "stock", 300, "forward and backward, times faster than timm"),
)


def render() -> str:
    """What was measured on a GPU, from results/gpu/."""
    found = [part for part in PARTS if (RESULTS / part).is_dir()]
    if not found:
        return "Not measured: no GPU was available."
    records = [read_json(RESULTS / part / "bench.json") for part in found]
    lines = [f"| `matmul`, B=512, C=768 | {' | '.join(part.replace('_', ' ') for part in found)} |"]
    lines.append("| --- |" + " --- |" * len(found))
    for phase, other, bound, what in TARGETS:
        texts = []
        for measured, _ in records:
            times = {row.contender: row.median_ms for row in measured if row.phase == phase}
            if "matmul" not in times or other not in times:
                texts.append("not measured")
            elif other == "floor":
                texts.append(judged(times["matmul"] / times[other], bound, True))
            elif measured[0].workload == "diverse":
                texts.append(judged(times[other] / times["matmul"], bound, False))
            else:
                texts.append(number(times[other] / times["matmul"]))
        lines.append(f"| {what} | {' | '.join(texts)} |")
    waits = [{who for row in measured for who in row.about["waits_for_gpu"]} for measured, _ in records]
    lines.append(f"| waits for the GPU | {' | '.join('yes' if 'matmul' in who else 'no' for who in waits)} |")
    about = records[0][1]
    lines += [
        "",
        f"{about['machine']}; torch {about['torch']}, timm {about['timm']}; {about['date']}, commit {about['commit']}; "
        "medians of the GPU's own time with cold caches; `uv run tools/update_readme.py --measure gpu`.",
    ]
    return "\n".join(lines)
