"""Sentences and tables of the pages other than those of races.

Each function with the name of a section makes what stands there.
"""

from dataclasses import fields

from tabulate import tabulate

from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.drift.report import cells
from timm_naflex_fast.commands.measure.drift.survey import Drift
from timm_naflex_fast.commands.measure.output import number
from timm_naflex_fast.commands.recordings.format import read_recording

from .race_tables import STEP, races, ratio
from .results import OURS, ROOT, Row, measure_again, read, read_one, table

KIT = ROOT / "recordings" / "siglip2_naflex_tiny"
AGREEMENT_STAGES = ("patch_embedding", "position_embedding", "block_1", "norm", "pooled")


def model_sentence() -> str:
    """What a whole step can gain at most."""
    shares = []
    batches = []
    for record in read("model/*"):
        for row in record["rows"]:
            shares.append(100 * row["about"]["embeds_share"][BASELINE])
            batches.append(row["batch"])
    return (
        "**Do not expect** a faster step on a CPU without `torch.compile`: in the models measured, "
        f"with up to {max(batches)} images,\n"
        f"timm's embeddings are {min(shares):.1f} to {max(shares):.1f} % of it."
    )


def pooled_of(row: Row) -> float:
    """How far a row's pooled output is, as a share of its largest number, from the same pixels."""
    (share,) = [stage["share"] for stage in row["stages"] if stage["stage"] == "pooled"]
    return float(share)


def siglip2_sentence() -> str:
    """How far the default mode is from the code that trained SigLIP-2."""
    (ours,) = [
        row for row in read_one("recordings/agreement")["rows"] if f", {OURS} of" in row["who"]
    ]
    return (
        "- **The embeddings that the weights were trained with.** From the same pixels, this package "
        f"gives the pooled output of\n  big_vision, which trained SigLIP-2, within "
        f"{ours['stages']['pooled']:.0e} of its largest number "
        "([random weights](docs/recordings.md#who-agrees-with-the-original))."
    )


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
    return "\n".join(["Where they part, and why:", *reasons, "", text])


def worked_example() -> str:
    """Ten numbers of the kit, to try a reader with."""
    recording = read_recording(KIT)
    stages = recording.stages[0]
    assert recording.table is not None
    numbers = [
        ("000.grid", stages["grid"]),
        ("000.pixels, first pixel", stages["pixels"][0, :3]),
        ("000.position_embedding, last token, last channel", stages["position_embedding"][-1, -1:]),
        ("000.block_1, first token, first two channels", stages["block_1"][0, :2]),
        ("000.pooled, first", stages["pooled"][:1]),
        ("table, row 2, column 5, channel 7", recording.table[2, 5, 7:8]),
    ]
    lines = []
    for name, values in numbers:
        lines.append({"array": name, "numbers": ", ".join(f"{value:.7g}" for value in values)})
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)


def mistakes() -> str:
    """The mistakes whose numbers are kept beside a recording."""
    about = read_recording(KIT).about
    lines = []
    for mistake in about["mistakes"]:
        lines.append(f"| `{mistake['name']}` | {mistake['words']} | `{mistake['stage']}` |")
    return "\n".join(["| name | what it is | first shows at |", "| --- | --- | --- |", *lines])


def siglip2_figures() -> str:
    """By how much two resize filters part timm's SigLIP-2 from transformers', and the same one."""
    _, pixels, *_ = read_one("against/bicubic")["against"]["stages"]
    same = read_one("against/bilinear")["against"]
    _, rounded, *_ = same["stages"]
    return (
        f"They differ by up to {pixels['largest']:.2f}, RMS {pixels['rms']:.3f}, where black is -1 "
        "and white 1.\nWith `--interpolation bilinear` pixels differ by at most "
        f"{rounded['largest'] * 255 / 2:.1f} grey levels of 255 on {same['pictures']} pictures, and "
        f"no stage parts:\nfrom the same pixels, the pooled outputs differ by {pooled_of(same):.0e} "
        "of their largest number."
    )


def exported_sentence() -> str:
    """What a run of an exported program takes beside timm's loop."""
    ratios: dict[str, list[float]] = {"embeddings": [], "whole model": []}
    for (part, *_), race in races("exported", ("part", *STEP)).items():
        for name in ("ONNX Runtime", "AOTInductor"):
            ratios[part].append(ratio(name, BASELINE)(race))
    embeddings, models = ratios.values()
    return (
        "In ONNX Runtime and AOTInductor the embeddings alone take "
        f"{number(min(embeddings))} to {number(max(embeddings))} times as long as timm's loop in "
        f"PyTorch,\nand the whole model {number(min(models))} to {number(max(models))} times."
    )


def rounding() -> str:
    """How far Siglip2's position embeddings are off in transformers, and in ours."""
    (record,) = read("rounding")
    lines = []
    for row in record["rows"]:
        off = [f"{row[how]:.1e}" for how in ("float32", "autocast")]
        lines.append([f"`{row['contender']}`", *off])
    headings = ["Siglip2's position embeddings are off by", "float32", "bf16 autocast"]
    return table(headings, lines, [record], measure_again([record]))


def never_slower() -> str:
    """The smallest ratio to timm in any race, of the two modes that keep timm's result."""
    timed = races("speed/*", (*STEP, "dtype")).values()
    modes = []
    for name in (OURS, "interpolate_cached"):
        least = min(ratio(BASELINE, name)(race) for race in timed)
        modes.append(f"`{name}` at least {number(least)} times")
    return (
        f"In {len(timed)} races of the position embeddings alone, {' and '.join(modes)} "
        "as fast as timm's loop."
    )


def graphs_text(row: Row) -> str:
    """How one way of compiling or exporting went."""
    if "error" in row:
        return "fails"
    if row["way"] in ("fullgraph=True", "export"):
        return "works"
    return "{graphs} / {breaks} / {recompiled}".format(**row)


def graphs() -> str:
    """What the compiler makes of each mode."""
    record = read_one("graphs")
    modes: dict[tuple[str, str], dict[str, str]] = {}
    for row in record["rows"]:
        ways = modes.setdefault((row["library"], f"`{row['contender']}`"), {})
        ways[row["way"]] = graphs_text(row)
    lines = [[*mode, *ways.values()] for mode, ways in modes.items()]
    headings = ["model", "mode", *ways]
    return table(headings, lines, [record], measure_again([record]))


def first_screen() -> str:
    """What decides whether to install it: graphs, export, and the distance from timm's results."""
    record = read_one("graphs")
    report = read_one("drift/digits/report")
    rows = {}
    for row in record["rows"]:
        if row["library"] == "timm":
            rows[row["contender"], row["way"]] = row

    # The name in this table, in graphs.json, and in the report about the digits, whose table is
    # bicubic.
    ways = [
        ("timm", BASELINE, BASELINE),
        ("timm's `grid_sample`", "timm's grid_sample", "timm-flag-bicubic"),
        ("this package", OURS, OURS),
    ]
    lines = []
    for name, contender, way in ways:
        compiled = rows[contender, "compile, four lengths"]
        exported = rows[contender, "export"]
        moved = 100 * report["survey"]["drift"][way]["embed_rel_rms"]
        if not moved:
            embeddings = "reference"
        elif moved > 1e-4:
            embeddings = f"off by {moved:.1f} % (digits)"
        else:
            embeddings = "equal but for rounding"
        works = "fails" if "error" in exported else "works"
        lines.append([name, compiled["graphs"], compiled["breaks"], works, embeddings])

    headings = ["20 training batches of 4 lengths", "graphs", "breaks", "export", "embeddings"]
    again = "uv run benchmarks/measure.py graphs"
    return table(headings, lines, [record, report["made"]], again)


def drift_peers() -> str:
    """The table of drift on the digits."""
    report = read_one("drift/digits/report")
    lines = []
    for name, drift in report["survey"]["drift"].items():
        line = cells(name, Drift(**{one.name: drift[one.name] for one in fields(Drift)}))
        _, *rest = line.values()
        lines.append([f"`{name}`", *rest])
    return table(list(line), lines, [report["made"]], report["made"]["command"])


def counts_text(counts: Row) -> str:
    """Counts of one run of pytest."""
    failed = f"**{counts['failed']} failed**, " if counts["failed"] else ""
    return f"{counts['passed']} passed, {failed}{counts['skipped']} skipped"


def versions() -> str:
    """The tests on every pairing of releases."""
    names = ("timm", "torch", "transformers", "python", "commit")
    rows = read_one("versions/matrix")["rows"]
    lines = []
    for row in rows:
        releases = [row.get(name, "") for name in names]
        lines.append([*releases, *(counts_text(counts) for counts in row["layers"].values())])
    return table([*names, *rows[0]["layers"]], lines, rows, "uv run nox -s pairing")


def timm_tests() -> str:
    """timm's own tests under each mode."""
    rows = read_one("versions/timm_tests")["rows"]
    lines = [[f"`{row['mode']}`", counts_text(row)] for row in rows]
    return table(["mode", "timm's own tests"], lines, rows, "uv run nox -s timm_tests")
