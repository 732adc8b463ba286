"""The tables of the pages other than those of races, and the first screen.

Each function with the name of a section makes what stands there.
"""

import re

from lab.tools.page_parts.results import (
    MODELS,
    OURS,
    ROOT,
    Row,
    measured,
    origin,
    read,
    rows_of,
    table,
    table_alone,
)
from timm_naflex_fast.commands.measure.drift.report import rows as drift_rows
from timm_naflex_fast.names import BASELINE

FLAG = "timm-flag-bilinear"
# The first screen's, and their names in the result file of lab/timm/race.py.
WAYS = {BASELINE: "timm's loop", FLAG: "timm's flag", OURS: "this package"}
AGREEMENT_STAGES = ("patch_embedding", "position_embedding", "block_1", "norm", "pooled")


def numbers() -> dict[str, str]:
    """The numbers that stand in sentences of the pages."""
    shares = [100 * row["about"]["embeds_share"][BASELINE] for row in rows_of(*MODELS)]
    compiled = rows_by_contender("compiled", phase="train")
    digits = read("drift/digits/report")["survey"]["drift"]
    flag = digits["grid_sample"]  # the flag's result
    photos = read("drift/photos/report")["survey"]["drift"]["grid_sample"]
    executorch = {(row["part"], row["kernels"]): row["off"] for row in rows_of("executorch")}
    return {
        "least_share": f"{min(shares):.1f}",
        "most_share": f"{max(shares):.1f}",
        "digits_accuracy": f"{100 * digits[BASELINE]['accuracy']:.2f}",
        "digits_accuracy_flag": f"{100 * flag['accuracy']:.2f}",
        "digits_tokens_flag": f"{100 * flag['embed_rel_rms']:.1f}",
        "photos_tokens_flag": f"{100 * photos['embed_rel_rms']:.1f}",
        "first_steps": str(compiled[OURS]["first steps"]),
        "first_steps_s": seconds(compiled[OURS]),
        "first_steps_s_timm": seconds(compiled[BASELINE]),
        "compiled_ms": milliseconds(compiled[OURS]),
        "compiled_ms_timm": milliseconds(compiled[BASELINE]),
        "executorch_portable": f"{executorch['model', 'portable']:.1e}",
        "executorch_xnnpack": f"{executorch['model', 'XNNPACK']:.1e}",
        "alone_ms": resize_alone(OURS),
        "alone_ms_timm": resize_alone(BASELINE),
    }


def seconds(row: Row) -> str:
    """What the steps that compile take."""
    return f"{row['first steps, s']:.0f} s" if row else "not timed"


def milliseconds(row: Row) -> str:
    """The range of the medians of several processes."""
    if not row:
        return "not timed"
    if "lowest_ms" not in row:
        return f"{row['median_ms']:.0f} ms (one process)"
    return f"{row['lowest_ms']:.0f} to {row['highest_ms']:.0f} ms"


def first_screen() -> str:
    """What decides whether to install it: each row of timm's loop, timm's flag, this package."""
    photos = read("drift/photos/report")
    survey = photos["survey"]
    moved = [survey["drift"][name] for name in (BASELINE, "grid_sample", OURS)]
    same = [round(row["neighbours"] * survey["images"]) for row in moved]
    compiled = graph_rows("compile, four lengths")
    steps = by_way(rows_by_contender("compiled", phase="train"))
    counted = by_way(rows_by_contender("counts", workload="siglip"))
    first_steps = steps[-1]["first steps"]
    rows = {
        "tokens off by, RMS": [f"{100 * row['embed_rel_rms']:.2g} %" for row in moved],
        "output off by, 1 - cosine": [f"{row['pooled_cosine_distance']:.2g}" for row in moved],
        f"nearest picture unchanged, of {survey['images']}": same,
        "compiled graphs": [row["graphs"] for row in compiled],
        "graph breaks": [row["breaks"] for row in compiled],
        "export of NaFlex batches": [graphs_text(row) for row in graph_rows("export")],
        f"first {first_steps} compiled training steps": [seconds(row) for row in steps],
        "a later one": [milliseconds(row) for row in steps],
        "the resize alone, training": [resize_alone(name) for name in WAYS],
        "its operators": [row["operators"] for row in counted],
        "its waits for a GPU": [row["host_waits"] for row in counted],
    }
    # Three columns stand within 400 pixels: timm's two ways share one.
    lines = [[what, f"{loop} / {flag}", ours] for what, (loop, flag, ours) in rows.items()]
    text = table_alone(["", "timm's loop / its flag", "this package"], lines)
    files = ("graphs", "compiled", "speed/siglip", "counts", "in_timm")
    abouts = [photos["made"], *map(read, files)]
    return f"{text}\n\n{origin(abouts)}."


def by_way(rows: dict[str, Row]) -> list[Row]:
    """Those of timm's loop, timm's flag and this package; {} of one that was not measured."""
    return [rows.get(name, {}) for name in WAYS]


def rows_by_contender(name: str, **wanted: str) -> dict[str, Row]:
    """The rows of a result file with these values, by contender."""
    found = {}
    for row in rows_of(name):
        if all(row[key] == value for key, value in wanted.items()):
            found[row["contender"]] = row
    return found


def graph_rows(way: str) -> list[Row]:
    """What became of one way of compiling timm's loop, timm's flag and this package."""
    rows = rows_by_contender("graphs", library="timm", way=way)
    return [rows[name] for name in (BASELINE, "timm's grid_sample", OURS)]


def resize_alone(contender: str) -> str:
    """The range of the medians of a training step on ``siglip``, in the processes that timed it."""
    medians = []
    for row in rows_of("speed/siglip", "in_timm"):
        is_step = (row["workload"], row["phase"]) == ("siglip", "train")
        if is_step and row["contender"] in (contender, WAYS[contender]):
            medians.append(row["median_ms"])
    return f"{min(medians):.0f} to {max(medians):.0f} ms"


def graphs_text(row: Row) -> str:
    """How one way of compiling or exporting went."""
    if "error" in row:
        return "fails"
    if row["way"] in ("fullgraph=True", "export"):
        return "works"
    return "{graphs}/{breaks}/{recompiled}".format(**row)


def graphs() -> str:
    """What the compiler makes of each mode."""
    modes: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of("graphs"):
        ways = modes.setdefault((row["library"], f"`{row['contender']}`"), {})
        ways[row["way"]] = graphs_text(row)
    lines = [[*mode, *ways.values()] for mode, ways in modes.items()]
    return measured(["model", "mode", *ways], lines, "graphs")


def rounding() -> str:
    """How far autocast moves Siglip2's position embeddings in transformers, and in ours."""
    lines = []
    for row in rows_of("rounding"):
        lines.append([f"`{row['contender']}`", f"{row['autocast']:.1e}"])
    headings = ["who computes Siglip2's position embeddings", "bf16 autocast moves them by"]
    return measured(headings, lines, "rounding")


def drift_peers() -> str:
    """The table of drift on the digits."""
    return drift_table("digits")


def drift_photos() -> str:
    """The table of drift on photos."""
    return drift_table("photos")


def drift_table(name: str) -> str:
    """How far each mode moves a model from timm's loop, from a report."""
    report = read(f"drift/{name}/report")
    lines = []
    for line in drift_rows(report["survey"]):
        mode, *rest = line.values()
        lines.append([f"`{mode}`", *rest])
    return table(list(line), lines, [report["made"]], report["made"]["command"])


def agreement() -> str:
    """Who agrees with SigLIP-2's original implementation, stage by stage."""
    record = read("recordings/agreement")
    lines = []
    for row in record["rows"]:
        shares = []
        for stage in AGREEMENT_STAGES:
            share = row["stages"].get(stage)
            shares.append("" if share is None else f"{share:.1e}")
        why = "; ".join(row["reason"] or [])
        lines.append([row["who"], *shares, row["parts at"] or "nowhere", why])
    headings = ["who", *AGREEMENT_STAGES, "parts at", "why"]
    return table(headings, lines, [record], record["command"])


def ten_lines() -> str:
    """The lines that the patch of ten lines adds for learned tables: the first two of its hunks."""
    patch = (ROOT / "lab" / "timm" / "ten_lines.patch").read_text()
    _, code = patch.split("+++ b/timm/models/naflexvit.py\n")
    hunks = code.split("@@ -")[1:3]
    added = re.findall(r"^\+( *[^# \n].*)", "".join(hunks), re.MULTILINE)
    return "\n".join(["```python", *added, "```"])


def in_timm() -> str:
    """timm's loop, both patches, timm's flag and this package: times, peak and waits."""
    record = read("in_timm")
    lines: dict[str, dict[str, list[str]]] = {}
    for row in record["rows"]:
        figures = lines.setdefault(row["contender"], {})
        figures.setdefault(f"{row['phase']}, ms", []).append(f"{row['median_ms']:.0f}")
        if row["phase"] == "train":
            figures.setdefault("peak, MB", []).append(f"{row['peak'] / 1e6:.0f}")
            figures.setdefault("waits", []).append(str(row["host_waits"]))
    shown = [[name, *map("/".join, figures.values())] for name, figures in lines.items()]
    headings = ["siglip/diverse/radio", *figures]
    again = "uv run lab/timm/race.py --json lab/results/in_timm.json"
    return table(headings, shown, [record], again)


def counts_text(counts: Row) -> str:
    """Counts of one run of pytest."""
    failed = f"**{counts['failed']} failed**, " if counts["failed"] else ""
    return f"{counts['passed']} passed, {failed}{counts['skipped']} skipped"


def versions() -> str:
    """The tests on every pairing of releases, and timm's own tests under each mode."""
    names = ("timm", "torch", "transformers", "python", "commit")
    rows = read("versions/matrix")["rows"]
    lines = []
    for row in rows:
        counts = [counts_text(counts) for counts in row["layers"].values()]
        lines.append([*(row.get(name, "") for name in names), *counts])
    matrix = table(
        [*names, *rows[0]["layers"]], lines, rows, "uv run nox -f lab/noxfile.py -s pairing"
    )

    rows = read("versions/timm_tests")["rows"]
    lines = [[f"`{row['mode']}`", counts_text(row)] for row in rows]
    own = table(
        ["mode", "timm's own tests"], lines, rows, "uv run nox -f lab/noxfile.py -s timm_tests"
    )
    return f"{matrix}\n\n{own}"
