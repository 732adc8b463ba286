"""Write the tables of the pages and the picture of drift from results/: uv run tools/pages.py.

With --check nothing is written: pages that differ from the result files are an error, and what
`complaints` finds is listed. With --release that is an error too.

No figure is typed by hand. The entry NAME of SECTIONS makes what stands in a page between
`<!-- NAME: begin -->` and `<!-- NAME: end -->`. The command that made a result file stands in it.
"""

import argparse
import ast
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tabulate import tabulate

import timm_naflex_fast
from timm_naflex_fast import functional, pictures
from timm_naflex_fast.measure.bench.race import times_faster
from timm_naflex_fast.measure.contenders import BASELINE
from timm_naflex_fast.measure.drift.plots import curves
from timm_naflex_fast.measure.drift.report import cells
from timm_naflex_fast.measure.drift.survey import Drift, GridDrift
from timm_naflex_fast.measure.output import number
from timm_naflex_fast.patching.install import Handle, Status
from timm_naflex_fast.recordings.format import read_recording

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
KIT = ROOT / "recordings" / "siglip2_naflex_tiny"
AGREEMENT_STAGES = ("patch_embedding", "position_embedding", "block_1", "norm", "pooled")
LEAST = 0.9  # of the library's own speed: what is slower stops a release
OURS = "matmul"
PLAIN_ADD = "plain-add"
ORIGIN = ("machine", "torch", "timm", "date", "commit")

# What figures depend on: where this code changes, they are old.
ROOMS = ("resampling", "batch", "strategies.py", "backends", "patching", "rope", "patch_embed")
NO_STEP_RUNS = ("install", "releases", "status")  # of patching
CODE = [
    *(f"timm_naflex_fast/{room}" for room in ROOMS),
    *(f":!timm_naflex_fast/patching/{name}.py" for name in NO_STEP_RUNS),
]
# What results/versions and results/tests depend on.
TESTED = ["timm_naflex_fast", ":!timm_naflex_fast/cli", ":!timm_naflex_fast/measure"]

Row = dict[str, Any]
Race = dict[str, Row]  # rows by contender
Column = Callable[[Race], Any]


# Result files.


def read(pattern: str) -> list[Row]:
    """The result files that exist, each with its name under "again"."""
    records = []
    for path in sorted(RESULTS.glob(f"{pattern}.json")):
        name = str(path.relative_to(RESULTS).with_suffix(""))
        records.append({**json.loads(path.read_text()), "again": name})
    return records


def read_one(name: str) -> Row:
    """One result file."""
    (record,) = read(name)
    return record


def races(pattern: str, by: Iterable[str]) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed, and by contender."""
    by_facts: dict[tuple[Any, ...], Race] = {}
    for record in read(pattern):
        for row in record["rows"]:
            name = row["contender"]
            about = row.get("about", {})
            counted = about.get("counted", {}).get(name, {})
            full = {**record, **about, **counted, **row}
            facts = tuple(full[key] for key in by)
            by_facts.setdefault(facts, {})[name] = full
    return by_facts


# What is wrong with the results.


def git(*arguments: str) -> str | None:
    """What git prints about this project; None: it cannot."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def parsed(commit: str, name: str) -> str:
    """A file of a commit as Python reads it, without comments and docstrings."""
    text = git("show", f"{commit}:{name}")
    if text is None:
        return ""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [statement for statement in body if not is_text(statement)]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string alone, as a docstring is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def has_changed(commit: str, code: Sequence[str]) -> bool:
    """Whether code has changed since a commit, beyond its words, or git does not know it."""
    diff = git("diff", "--name-only", commit, "HEAD", "--", *code)
    if diff is None:
        return True
    return any(parsed(commit, name) != parsed("HEAD", name) for name in diff.split())


def outdated(abouts: Iterable[Row], code: Sequence[str]) -> Iterator[str]:
    """The commits of figures or tests whose code has changed since."""
    commits = dict.fromkeys(about["commit"] for about in abouts)
    for commit in commits:
        if has_changed(commit, code):
            yield f"its code has changed since {commit}"


def lost_races(rows: Iterable[Row]) -> Iterator[str]:
    """Races in which this package is slower than the library's own code."""
    text = "{workload} {phase} B={batch} {contender} has {times_faster:.2f} of the library's speed"
    for row in rows:
        if row["contender"].startswith(("timm-", PLAIN_ADD)):
            continue
        if row["times_faster"] is not None and row["times_faster"] < LEAST:
            yield text.format(**row)


def failed_tests(rows: Iterable[Row]) -> Iterator[str]:
    """Tests that fail on a pairing of releases, or under a mode but not under stock."""
    for row in rows:
        failed = list(row.get("broken", []))
        for counts in row.get("layers", {}).values():
            failed += counts["failures"]
        for name in failed:
            yield f"{name} fails"


def complaints_about(record: Row) -> Iterator[str]:
    """What is wrong with one result file."""
    match record["again"].split("/"):
        case ["versions", _]:  # each row was made by itself
            yield from outdated(record["rows"], TESTED)
            yield from failed_tests(record["rows"])
        case ["tests", _]:
            yield from outdated([record], TESTED)
            for name in record["green"]:
                yield f"{name} passes without ours"
        case ["against" | "drift", *_]:
            yield from outdated([record["made"]], CODE)
        case ["recordings", "jax_float64"]:
            return  # none of this package's code has part in it
        case ["counts" | "graphs" | "exported" | "rounding"]:  # not timed, or not against the same
            yield from outdated([record], CODE)
        case _:
            yield from outdated([record], CODE)
            yield from lost_races(record["rows"])


def complaints() -> Iterator[str]:
    """Old figures and tests, lost races, and tests that fail or notice nothing."""
    for record in read("**/*"):
        for line in complaints_about(record):
            yield f"results/{record['again']}.json: {line}"


# Tables of races.


def table(
    headings: Sequence[str], lines: Iterable[Sequence[Any]], abouts: Sequence[Row], command: str
) -> str:
    """A table, where its figures come from, and the command that makes them again.

    Each fact of the origin is said once where the files agree.
    """
    texts = [[str(value) for value in line] for line in lines]
    text = tabulate(texts, headings, tablefmt="github", disable_numparse=True)
    origin = []
    for fact in ORIGIN:
        values = dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts)
        origin.append(" / ".join(values))
    machine, torch, timm, date, commit = origin
    return f"{text}\n\n{machine}; torch {torch}, timm {timm}; {date}, commit {commit}; `{command}`."


def measure_again(abouts: Sequence[Row]) -> str:
    """The command that measures result files again."""
    return f"uv run benchmarks/measure.py {' '.join(about['again'] for about in abouts)}"


def ms(contender: str) -> Column:
    """Milliseconds."""
    return lambda race: race[contender]["median_ms"] if contender in race else math.nan


def ratio(slow: str, fast: str = OURS) -> Column:
    """How many times as long the one takes."""
    return lambda race: ms(slow)(race) / ms(fast)(race)


def figure(name: str) -> Column:
    """A figure of a race that has one contender."""
    return lambda race: next(iter(race.values()))[name]


def gigabytes(name: str) -> Column:
    """A number of bytes of a race that has one contender."""
    return lambda race: figure(name)(race) / 1e9


LAUNCH_MS = 0.005  # for each operator, as an order of magnitude
GPU_BYTES_A_MS = 3.35e9  # of the memory of an H100


def gpu_estimate(race: Race) -> float:
    """Milliseconds on a GPU as they follow from the counts alone: nobody has measured them."""
    count = figure("operators")(race)
    moved = figure("read")(race) + figure("written")(race)
    return float(count * LAUNCH_MS + moved / GPU_BYTES_A_MS)


def share(contender: str) -> Column:
    """The embeddings' share of a step."""
    return lambda race: f"{100 * race[contender]['embeds_share'][contender]:.1f} %"


def cell(value: Any) -> str:
    """A value of a column as text; "-" for what was not measured."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


STEP = ("workload", "phase", "batch")
FASTER: dict[str, Column] = {
    "times faster than timm": ratio(BASELINE),
    "than timm's grid_sample": ratio("timm-flag-bilinear"),
    "of the time of one plain add": ratio(OURS, PLAIN_ADD),
}
POSITION: dict[str, Column] = {
    **FASTER,
    "`interpolate_cached` than timm": ratio(BASELINE, "interpolate_cached"),
    "`grid_sample` than timm": ratio(BASELINE, "grid_sample"),
}
SAVED: dict[str, Column] = {
    "timm, ms": ms(BASELINE),
    "`matmul`, ms": ms(OURS),
    "times faster than timm": lambda race: times_faster(race[BASELINE], race[OURS]),
    "embeddings' share, timm": share(BASELINE),
    "`matmul`": share(OURS),
}
COUNTS: dict[str, Column] = {
    "waits for the device": figure("host_waits"),
    "operators": figure("operators"),
    "read, GB": gigabytes("read"),
    "written, GB": gigabytes("written"),
    "peak beyond x, GB": gigabytes("peak"),
    "estimate, ms": gpu_estimate,
}
ROPE: dict[str, Column] = {
    "timm, ms": ms(BASELINE),
    "batched, ms": ms("batched"),
    "times faster": ratio(BASELINE, "batched"),
}
COMPILED: dict[str, Column] = {
    "graphs": figure("graphs"),
    "breaks": figure("breaks"),
    "graphs after the first batch": figure("graphs after the first batch"),
    "first steps, s": figure("first steps, s"),
    "a later step, ms": figure("median_ms"),
}
EXPORTED: dict[str, Column] = {
    "timm's loop, ms": ms(BASELINE),
    "timm's grid_sample": ms("timm-flag-bicubic"),
    "exported, torch.export": ms("torch.export"),
    "exported, AOTInductor": ms("AOTInductor"),
    "exported, ONNX Runtime": ms("ONNX Runtime"),
    "exported, OpenVINO": ms("OpenVINO"),
}
SIGLIP2: dict[str, Column] = {
    "transformers, ms": ms(BASELINE),
    "`interpolate_cached`": ms("interpolate_cached"),
    "`matmul`": ms(OURS),
    "times faster": ratio(BASELINE),
}
LARGE = [
    {"diverse", "train", 512, name} for name in (BASELINE, OURS, f"{OURS}, traceable", PLAIN_ADD)
]


class Section(NamedTuple):
    """A table of races."""

    files: str  # a pattern of result files
    by: tuple[str, ...]  # what tells their races from each other
    columns: dict[str, Column]
    needed: Sequence[set[Any]] = (set(),)  # only races whose ``by`` holds one of these sets


SIGLIP_64 = {"siglip", 64, "float32"}
DIVERSE_64 = {"diverse", 64, "float32"}
SIGLIP_MODEL = {"naflexvit_base_patch16_siglip"}
KERNELS: dict[str, Column] = {"times faster than timm": ratio(BASELINE)}
COMPILED_BY = ("workload", "phase", "contender")
RACES = {
    "speed": Section("speed/*", (*STEP, "dtype"), FASTER, [SIGLIP_64, DIVERSE_64]),
    "position": Section("speed/*", (*STEP, "dtype"), POSITION),
    "model_short": Section("model/*", ("model", *STEP), SAVED, [SIGLIP_MODEL, {64}]),
    "model": Section("model/*", ("model", *STEP), SAVED),
    "counts_short": Section("counts", (*STEP, "contender"), COUNTS, LARGE),
    "counts": Section("counts", (*STEP, "contender"), COUNTS),
    "patch_embed": Section("patch_kernels", ("workload", "phase"), KERNELS),
    "compiled": Section("compiled", COMPILED_BY, COMPILED),
    "exported": Section("exported", ("part", *STEP), EXPORTED),
    "rope": Section("rope", STEP, ROPE),
    "other_libraries": Section("other_libraries", STEP, SIGLIP2),
}


def race_table(name: str) -> str:
    """One of RACES."""
    section = RACES[name]
    lines = []
    for facts, race in races(section.files, section.by).items():
        if not any(needed <= set(facts) for needed in section.needed):
            continue
        what = ", ".join(str(fact) for fact in facts)
        lines.append([what, *(cell(column(race)) for column in section.columns.values())])
    what = ", ".join(section.by).replace("contender", "mode")
    headings = [what, *section.columns]
    records = read(section.files)
    return table(headings, lines, records, measure_again(records))


# Other sections. Each function is the section of its name.


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
        line = cells(name, Drift(**drift))
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


RETURNED = (Handle, Status)  # what enable and status return


def function_text(module: ModuleType, name: str) -> str:
    """A public function: its call, without types, and the first sentence of its docstring."""
    function = getattr(module, name)
    signature = inspect.signature(function)
    untyped = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    call = str(signature.replace(parameters=untyped)).replace(", *,", ",\n    *,")
    for cls in RETURNED:
        call = call.replace(f"{cls.__module__}.", "")
    first = str(function.__doc__).split("\n\n")[0]
    sentence = " ".join(first.split())
    return f"### `{module.__name__}.{name}`\n\n```text\n{name}{call}\n```\n\n{sentence}"


def api() -> str:
    """The public functions, and what two of them return."""
    parts = [function_text(timm_naflex_fast, name) for name in ("enable", "disable", "status")]
    parts += [function_text(functional, name) for name in functional.__all__]
    parts.append(function_text(pictures, "patches_of"))
    parts += [f"### `{cls.__name__}`\n\n{inspect.getdoc(cls)}" for cls in RETURNED]
    return "\n\n".join(parts)


SECTIONS: dict[str, Callable[[], str]] = {
    "first_screen": first_screen,
    "graphs": graphs,
    "model_sentence": model_sentence,
    "never_slower": never_slower,
    "rounding": rounding,
    "siglip2_sentence": siglip2_sentence,
    "agreement": agreement,
    "worked_example": worked_example,
    "mistakes": mistakes,
    "siglip2_figures": siglip2_figures,
    "exported_sentence": exported_sentence,
    "drift_peers": drift_peers,
    "versions": versions,
    "timm_tests": timm_tests,
    "api": api,
    **{name: partial(race_table, name) for name in RACES},
}
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """``text`` with what is between the markers of each of its sections replaced."""
    for name, render in SECTIONS.items():
        begin = f"<!-- {name}: begin -->\n"
        end = f"\n<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            after = rest.split(end.strip())[1]
            text = head + begin + render() + end + after
    return text


INK = {"graphs.svg": "#1f2328", "graphs_dark.svg": "#e6edf3"}  # on a light page, on a dark one
BOX = 34
GAP = 22


def graphs_picture(ink: str) -> str:
    """The compiled graphs of a training run as boxes, with a mark at each break between two."""
    shown = {BASELINE: "timm's loop", OURS: "this package"}
    rows = {}
    for row in read_one("graphs")["rows"]:
        if row["library"] == "timm" and row["way"] == "compile, four lengths":
            rows[row["contender"]] = row

    parts = []
    for y, (name, words) in zip((8, 64), shown.items()):
        count = rows[name]["graphs"]
        breaks = rows[name]["breaks"]
        said = f"{words}: {count} graphs, {breaks} breaks"
        parts.append(f'<text x="0" y="{y + 22}">{said}</text>')
        for i in range(count):
            left = 260 + i * (BOX + GAP)
            box = f'x="{left}" y="{y}" width="{BOX}" height="{BOX}" rx="5"'
            parts.append(f'<rect {box} fill="#2da44e" fill-opacity="0.75"/>')
            if i < breaks:
                parts.append(
                    f'<text x="{left + BOX + 5}" y="{y + 23}" fill="#cf222e">&#215;</text>'
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 106" width="820" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{ink}" role="img">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_graphs() -> None:
    """Draw the picture of graphs, for light and dark pages."""
    for file, ink in INK.items():
        (ROOT / "docs" / file).write_text(graphs_picture(ink))


def draw_drift() -> None:
    """Draw the picture of drift on the digits."""
    grids = [GridDrift(**grid) for grid in read_one("drift/digits/report")["survey"]["grids"]]
    picture = curves(grids, ("grid_sample", OURS))
    picture.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)


def main() -> int:
    """Write the pages and the picture, or tell which pages are old."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; tell what is old")
    parser.add_argument(
        "--release", action="store_true", help="as --check; any complaint is an error"
    )
    options = parser.parse_args()
    new = {page: fill(page.read_text()) for page in PAGES}
    old = [page for page, text in new.items() if text != page.read_text()]

    if options.check or options.release:
        wrong = list(complaints())
        for page in old:
            print(f"{page.relative_to(ROOT)} is old: uv run tools/pages.py")
        for line in wrong:
            print(line)
        is_error = bool(old)
        if options.release and wrong:
            is_error = True
        return is_error

    for page in old:
        page.write_text(new[page])
    draw_drift()
    draw_graphs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
