"""The tables of the pages other than those of races, and the first screen.

Each function with the name of a section makes what stands there.
"""

import json

from lab.tools.page_parts.results import (
    MODELS,
    OURS,
    ROOT,
    Row,
    measured,
    read_one,
    rows_of,
    table,
)
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.drift.report import rows as drift_rows

IN_TIMM = ROOT / "lab" / "timm"
AGREEMENT_STAGES = ("patch_embedding", "position_embedding", "block_1", "norm", "pooled")


def numbers() -> dict[str, str]:
    """The numbers that stand in sentences of the pages."""
    shares = []
    batches = []
    for row in rows_of(*MODELS):
        shares.append(100 * row["about"]["embeds_share"][BASELINE])
        batches.append(row["batch"])
    compiled = {}
    for row in rows_of("compiled"):
        if row["phase"] == "train":
            compiled[row["contender"]] = row
    ours = compiled[OURS]
    (exact,) = [row for row in rows_of("recordings/agreement") if f", {OURS} of" in row["who"]]
    photos = read_one("drift/photos/report")["made"]
    return {
        "least_share": f"{min(shares):.1f}",
        "most_share": f"{max(shares):.1f}",
        "most_images": str(max(batches)),
        "from_big_vision": f"{exact['stages']['pooled']:.1e}",
        "photos_date": photos["date"],
        "photos_commit": photos["commit"],
        "first_steps": str(ours["first steps"]),
        "first_steps_s": f"{ours['first steps, s']:.0f}",
        "first_steps_s_timm": f"{compiled[BASELINE]['first steps, s']:.0f}",
        "compiled_faster": f"{ours['times_faster']:.2f}",
        "compiled_ms": milliseconds(ours),
        "compiled_ms_timm": milliseconds(compiled[BASELINE]),
    }


def milliseconds(row: Row) -> str:
    """The range of the medians of several processes."""
    if "lowest_ms" not in row:
        return "one process"
    return f"{row['lowest_ms']:.0f} to {row['highest_ms']:.0f} ms"


def first_screen() -> str:
    """What decides whether to install it: the distance from timm's embeddings, graphs, export."""
    report = read_one("drift/photos/report")
    rows = {}
    for row in rows_of("graphs"):
        if row["library"] == "timm":
            rows[row["contender"], row["way"]] = row

    # The name in this table, in graphs.json, and in the report about photos, whose table is
    # bilinear.
    ways = [
        ("timm", BASELINE, BASELINE),
        ("timm's flag", "timm's grid_sample", "timm-flag-bilinear"),
        ("this package", OURS, OURS),
    ]
    lines = []
    for name, contender, way in ways:
        compiled = rows[contender, "compile, four lengths"]
        works = graphs_text(rows[contender, "export"])
        moved = 100 * report["survey"]["drift"][way]["embed_rel_rms"]
        lines.append([name, f"{moved:.2g} %", compiled["graphs"], compiled["breaks"], works])

    headings = ["", "tokens off by"]  # the second stands within 400 pixels
    headings += ["compiled graphs", "breaks", "export"]
    return measured(headings, lines, "graphs")


def graphs_text(row: Row) -> str:
    """How one way of compiling or exporting went."""
    if "error" in row:
        return "fails"
    if row["way"] in ("fullgraph=True", "export"):
        return "works"
    return "{graphs} / {breaks} / {recompiled}".format(**row)


def graphs() -> str:
    """What the compiler makes of each mode."""
    modes: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows_of("graphs"):
        ways = modes.setdefault((row["library"], f"`{row['contender']}`"), {})
        ways[row["way"]] = graphs_text(row)
    lines = [[*mode, *ways.values()] for mode, ways in modes.items()]
    return measured(["model", "mode", *ways], lines, "graphs")


def rounding() -> str:
    """How far Siglip2's position embeddings are off in transformers, and in ours."""
    lines = []
    for row in rows_of("rounding"):
        off = [f"{row[how]:.1e}" for how in ("float32", "autocast")]
        lines.append([f"`{row['contender']}`", *off])
    headings = ["Siglip2's position embeddings are off by", "float32", "bf16 autocast"]
    return measured(headings, lines, "rounding")


def drift_peers() -> str:
    """The table of drift on the digits."""
    report = read_one("drift/digits/report")
    lines = []
    for line in drift_rows(report["survey"]):
        name, *rest = line.values()
        lines.append([f"`{name}`", *rest])
    return table(list(line), lines, [report["made"]], report["made"]["command"])


def agreement() -> str:
    """Who agrees with SigLIP-2's original implementation, stage by stage."""
    record = read_one("recordings/agreement")
    lines = []
    reasons = []
    for row in record["rows"]:
        shares = []
        for stage in AGREEMENT_STAGES:
            share = row["stages"].get(stage)
            shares.append("" if share is None else f"{share:.1e}")
        lines.append([row["who"], *shares, row["parts at"] or "nowhere"])
        if row["reason"]:
            reasons.append(f"- {row['who']}: {'; '.join(row['reason'])}.")
    headings = ["who", *AGREEMENT_STAGES, "parts at"]
    text = table(headings, lines, [record], record["command"])
    return "\n".join([*reasons, "", text])


def ten_lines() -> str:
    """The lines that the patch of ten lines adds for learned tables: the first two of its hunks."""
    patch = (IN_TIMM / "ten_lines.patch").read_text()
    _, *hunks = patch.split("+++ b/timm/models/naflexvit.py")[1].split("\n@@")
    added = []
    for line in "\n".join(hunks[:2]).splitlines():
        is_code = line[1:].strip() and not line[1:].lstrip().startswith("#")
        if line.startswith("+") and is_code:
            added.append(line[1:])
    return "\n".join(["```python", *added, "```"])


def in_timm() -> str:
    """timm's loop, both patches, timm's flag and this package: times, peak and waits."""
    record = json.loads((IN_TIMM / "race.json").read_text())
    lines: dict[str, dict[str, list[str]]] = {}
    for row in record["rows"]:
        figures = lines.setdefault(row["contender"], {})
        figures.setdefault(f"{row['phase']}, ms", []).append(f"{row['median_ms']:.0f}")
        if row["phase"] == "train":
            figures.setdefault("peak, MB", []).append(f"{row['peak'] / 1e6:.0f}")
            figures.setdefault("waits", []).append(str(row["host_waits"]))
    shown = [[name, *map("/".join, figures.values())] for name, figures in lines.items()]
    headings = ["siglip/diverse/radio", *figures]
    again = "uv run lab/timm/race.py --json lab/timm/race.json"
    return table(headings, shown, [record], again)


def counts_text(counts: Row) -> str:
    """Counts of one run of pytest."""
    failed = f"**{counts['failed']} failed**, " if counts["failed"] else ""
    return f"{counts['passed']} passed, {failed}{counts['skipped']} skipped"


def versions() -> str:
    """The tests on every pairing of releases, and timm's own tests under each mode."""
    names = ("timm", "torch", "transformers", "python", "commit")
    rows = read_one("versions/matrix")["rows"]
    lines = []
    for row in rows:
        counts = [counts_text(counts) for counts in row["layers"].values()]
        lines.append([*(row.get(name, "") for name in names), *counts])
    matrix = table(
        [*names, *rows[0]["layers"]], lines, rows, "uv run nox -f lab/noxfile.py -s pairing"
    )

    rows = read_one("versions/timm_tests")["rows"]
    lines = [[f"`{row['mode']}`", counts_text(row)] for row in rows]
    own = table(
        ["mode", "timm's own tests"], lines, rows, "uv run nox -f lab/noxfile.py -s timm_tests"
    )
    return f"{matrix}\n\n{own}"
