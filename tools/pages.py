"""Write the tables of the pages and the picture of drift from results/: uv run tools/pages.py.

With --check nothing is written: pages that differ from the result files are an error, and what `complaints` finds is
listed. With --release that is an error too.

No figure is typed by hand. What stands in a page between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is made by the
entry NAME of RACES, or by the function NAME. The command that made a result file stands in it.
"""

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

import timm_naflex_fast
from timm_naflex_fast import functional
from timm_naflex_fast.measure.bench.race import times_faster
from timm_naflex_fast.measure.contenders import BASELINE, CONTENDERS, PLAIN_ADD
from timm_naflex_fast.measure.drift.plots import curves
from timm_naflex_fast.measure.drift.report import HEADINGS, row_text
from timm_naflex_fast.measure.drift.survey import Drift
from timm_naflex_fast.measure.output import number

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LEAST = 0.9  # of the library's own speed: what is slower stops a release
OURS = "matmul"
ORIGIN = ("machine", "torch", "timm", "date", "commit")
# What figures depend on, in the package: where it changes, they are old.
CODE = [f"timm_naflex_fast/{room}" for room in "resampling strategies backends patching rope patch_embed".split()]
CODE += [f":!timm_naflex_fast/patching/{name}.py" for name in ("install", "compat", "status")]  # no step runs them
TESTED = ["timm_naflex_fast", ":!timm_naflex_fast/cli", ":!timm_naflex_fast/measure"]  # by versions/ and tests/
Race = dict[str, dict[str, Any]]  # rows by contender
Column = Callable[[Race], Any]


def read(pattern: str) -> list[Any]:
    """The result files that exist, each with its name."""
    paths = sorted(RESULTS.glob(f"{pattern}.json"))
    return [{**json.loads(path.read_text()), "again": str(path.relative_to(RESULTS).with_suffix(""))} for path in paths]


def complaints() -> Iterator[str]:
    """Figures and tests whose code has changed since, races that are lost, and tests that fail or notice nothing."""
    for record in read("**/*"):
        file, rows = f"results/{record['again']}.json", record.get("rows", [])
        code = TESTED if record["again"].startswith(("versions/", "tests/")) else CODE
        for commit in dict.fromkeys(one.get("commit", "HEAD") for one in (record.get("made", record), *rows)):
            command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "HEAD", "--", *code]
            if subprocess.run(command, capture_output=True).returncode:
                yield f"{file}: its code has changed since {commit}"
        yield from (f"{file}: {name} passes where ours never runs" for name in record.get("green", []))
        runs = [run for row in rows for run in row.get("layers", {"": row}).values()]
        yield from (f"{file}: {name} fails" for run in runs for name in run.get("broken", run.get("failures", [])))
        for row in rows:
            ours = row.get("suite", "exported") != "exported" and not row["contender"].startswith(("timm-", PLAIN_ADD))
            if ours and row["times_faster"] is not None and row["times_faster"] < LEAST:
                race = "{workload} {phase} B={batch} {contender} has {times_faster:.2f} of the library's speed"
                yield f"{file}: {race.format(**row)}"


def races(pattern: str, by: Iterable[str]) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed, and by contender."""
    found: dict[tuple[Any, ...], Race] = {}
    for record in read(pattern):
        for row in record["rows"]:
            name, about = row["contender"], row.get("about", {})
            full = {**record, **about, **about.get("counted", {}).get(name, {}), **row}
            found.setdefault(tuple(full[key] for key in by), {})[name] = full
    return found


def table(headings: Sequence[str], lines: Iterable[Sequence[Any]], abouts: Sequence[Any], command: str = "") -> str:
    """A table, where its figures come from (each fact once where the files agree), and what measures them again."""
    text = tabulate([[*map(str, line)] for line in lines], headings, tablefmt="github", disable_numparse=True)
    origin = [" / ".join(dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts)) for fact in ORIGIN]
    again = command or f"uv run benchmarks/measure.py {' '.join(about['again'] for about in abouts)}"
    return "{}\n\n{}; torch {}, timm {}; {}, commit {}; `{}`.".format(text, *origin, again)


def ms(contender: str) -> Column:
    """Milliseconds."""
    return lambda race: race[contender]["median_ms"] if contender in race else math.nan


def ratio(slow: str, fast: str = OURS) -> Column:
    """How many times as long the one takes."""
    return lambda race: ms(slow)(race) / ms(fast)(race)


def figure(name: str, unit: float | None = None) -> Column:
    """A figure of a race that has one contender."""
    return lambda race: next(iter(race.values()))[name] if unit is None else next(iter(race.values()))[name] / unit


def share(contender: str) -> Column:
    """The embeddings' share of a step."""
    return lambda race: f"{100 * race[contender]['embeds_share'][contender]:.1f} %"


def cell(value: Any) -> str:
    """A value of a column as text; "-" for what was not measured."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


STEP = ("workload", "phase", "batch")
FASTER = {"times faster than timm": ratio(BASELINE), "than timm's grid_sample": ratio("timm-flag-bilinear")}
FASTER |= {"times one plain add": ratio(OURS, PLAIN_ADD)}
POSITION = FASTER | {f"`{mode}` than timm": ratio(BASELINE, mode) for mode in ("interpolate_cached", "grid_sample")}
SAVED: dict[str, Column] = {"timm, ms": ms(BASELINE), "`matmul`, ms": ms(OURS)}
SAVED |= {"times faster than timm": lambda race: times_faster(race[BASELINE], race[OURS])}
SAVED |= {"embeddings' share, timm": share(BASELINE), "`matmul`": share(OURS)}
COUNTS = {"waits for the device": figure("host_waits"), "operators": figure("operators")}
COUNTS |= {"read, GB": figure("read", 1e9), "written, GB": figure("written", 1e9)}
COUNTS |= {"peak beyond x, GB": figure("peak", 1e9)}
ROPE = {"timm, ms": ms(BASELINE), "batched, ms": ms("batched"), "times faster": ratio(BASELINE, "batched")}
GRAPHS = ("graphs", "breaks", "graphs after the first batch", "first steps, s")
COMPILED = {name: figure(name) for name in GRAPHS} | {"a later step, ms": figure("median_ms")}
EXPORTED = {"timm's loop, ms": ms(BASELINE), "timm's grid_sample": ms("timm-flag-bicubic")}
EXPORTED |= {f"exported, {name}": ms(name) for name in ("torch.export", "ONNX Runtime", "OpenVINO")}
SIGLIP2 = {"transformers, ms": ms(BASELINE), "`interpolate_cached`": ms("interpolate_cached"), "`matmul`": ms(OURS)}
ANY, LARGE = [set[Any]()], [{"diverse", "train", 512, who} for who in (BASELINE, OURS, f"{OURS}, traceable", PLAIN_ADD)]
# Section: result files, what tells their races from each other, columns, and which races: those with one of these sets.
RACES: dict[str, tuple[str, tuple[str, ...], dict[str, Column], list[set[Any]]]] = {
    "speed": ("speed/*", (*STEP, "dtype"), FASTER, [{"siglip", 64, "float32"}, {"diverse", 64, "float32"}]),
    "position": ("speed/*", (*STEP, "dtype"), POSITION, ANY),
    "model_short": ("model/*", ("model", *STEP), SAVED, [{"naflexvit_base_patch16_siglip"}, {64}]),
    "model": ("model/*", ("model", *STEP), SAVED, ANY),
    "counts_short": ("counts", (*STEP, "contender"), COUNTS, LARGE),
    "counts": ("counts", (*STEP, "contender"), COUNTS, ANY),
    "patch_embed": ("patch_kernels", ("workload", "phase"), {"times faster than timm": ratio(BASELINE)}, ANY),
    "compiled": ("compiled", ("workload", "phase", "contender"), COMPILED, ANY),
    "exported": ("exported", ("part", *STEP), EXPORTED, ANY),
    "rope": ("rope", STEP, ROPE, ANY),
    "other_libraries": ("other_libraries", STEP, SIGLIP2 | {"times faster": ratio(BASELINE)}, ANY),
}


def race_table(name: str) -> str:
    """One of RACES."""
    pattern, by, shown, needed = RACES[name]
    found = {key: race for key, race in races(pattern, by).items() if any(one <= {*key} for one in needed)}
    lines = [[", ".join(map(str, key)), *(cell(show(race)) for show in shown.values())] for key, race in found.items()]
    return table([", ".join(by), *shown], lines, read(pattern))


def model_sentence() -> str:
    """What a whole step can gain at most."""
    rows = [row for record in read("model/*") for row in record["rows"]]
    shares, most = [100 * row["about"]["embeds_share"][BASELINE] for row in rows], max(row["batch"] for row in rows)
    return (
        "**Do not expect** a faster step on a CPU without `torch.compile`: in the models measured, with up to "
        f"{most} images,\ntimm's embeddings are {min(shares):.1f} to {max(shares):.1f} % of it."
    )


def never_slower() -> str:
    """The smallest ratio to timm in any race of the position embeddings, of the two modes that keep timm's result."""
    found = races("speed/*", (*STEP, "dtype")).values()
    least = {name: min(map(ratio(BASELINE, name), found)) for name in (OURS, "interpolate_cached")}
    modes = " and ".join(f"`{name}` at least {number(value)} times" for name, value in least.items())
    return f"In {len(found)} races of the position embeddings alone, {modes} as fast as timm's loop."


def graphs() -> str:
    """What the compiler makes of each mode."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    (record,) = read("graphs")
    for row in record["rows"]:
        text = "works" if row["way"] in ("fullgraph=True", "export") else "{graphs} / {breaks} / {recompiled}"
        ways = found.setdefault((row["library"], f"`{row['contender']}`"), {})
        ways[row["way"]] = "fails" if "error" in row else text.format(**row)
    return table(["model", "mode", *ways], [[*key, *ways.values()] for key, ways in found.items()], [record])


def first_screen() -> str:
    """What decides whether to install it: compiled and exported, and how far the embeddings are from timm's."""
    (record,), (report,) = read("graphs"), read("drift/digits/report")
    rows = {(row["contender"], row["way"]): row for row in record["rows"] if row["library"] == "timm"}
    flag = ("timm's grid_sample", "timm-flag-bicubic")  # the digits' table is bicubic
    ways = {"timm": (BASELINE, BASELINE), "timm's `grid_sample`": flag, "this package": (OURS, OURS)}
    lines = []
    for name, (contender, way) in ways.items():
        moved = 100 * report["survey"]["drift"][way]["embed_rel_rms"]
        compiled, exported = (rows[contender, how] for how in ("compile, four lengths", "export"))
        embeddings = f"off by {moved:.1f} % (digits)" if moved > 1e-4 else "equal but for rounding"
        works = "fails" if "error" in exported else "works"
        lines.append([name, compiled["graphs"], compiled["breaks"], works, embeddings if moved else "reference"])
    headings = ["20 training batches of 4 lengths", "graphs", "breaks", "export", "embeddings"]
    again = f"uv run benchmarks/measure.py graphs`, `{report['made']['command']}"
    return table(headings, lines, [record, report["made"]], again)


def drift_peers() -> str:
    """The table of drift on the digits."""
    (report,) = read("drift/digits/report")
    found = report["survey"]["drift"].items()
    lines = [[f"`{name}`", CONTENDERS[name], *row_text(Drift(**one), HEADINGS)] for name, one in found]
    return table(["mode", "what it is", *HEADINGS.values()], lines, [report["made"]], report["made"]["command"])


def words(run: dict[str, Any]) -> str:
    """Counts of one run of pytest."""
    return f"{run['passed']} passed, {f'**{n} failed**, ' if (n := run['failed']) else ''}{run['skipped']} skipped"


def versions() -> str:
    """The tests on every pairing of releases."""
    names, rows = ("timm", "torch", "transformers", "python", "commit"), read("versions/matrix")[0]["rows"]
    lines = [[*(row.get(name, "") for name in names), *map(words, row["layers"].values())] for row in rows]
    return table([*names, *rows[0]["layers"]], lines, rows, "uv run nox -s pairing")


def timm_tests() -> str:
    """timm's own tests under each mode."""
    rows = read("versions/timm_tests")[0]["rows"]
    lines = [[f"`{row['mode']}`", words(row)] for row in rows]
    return table(["mode", "timm's own tests"], lines, rows, "uv run nox -s timm_tests")


def api() -> str:
    """Each public function: its call, and the first sentence of its docstring."""
    parts = []
    for module, names in ((timm_naflex_fast, ("enable", "disable", "status")), (functional, functional.__all__)):
        for name in names:
            function = getattr(module, name)
            taken = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
            call = str(inspect.Signature(taken)).replace(", *,", ",\n    *,")
            said = " ".join(str(function.__doc__).split("\n\n")[0].split())
            parts.append(f"### `{module.__name__}.{name}`\n\n```text\n{name}{call}\n```\n\n{said}")
    return "\n\n".join(parts)


FUNCTIONS = (first_screen, graphs, model_sentence, never_slower, drift_peers, versions, timm_tests, api)
SECTIONS: dict[str, Callable[[], str]] = {function.__name__: function for function in FUNCTIONS}
SECTIONS |= {name: partial(race_table, name) for name in RACES}
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """``text`` with what is between the markers of each of its sections replaced."""
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + render() + end + rest.split(end.strip())[1]
    return text


def main() -> int:
    """Write the pages and the picture, or tell which pages are old."""
    new = {page: fill(page.read_text()) for page in PAGES}
    old = [page for page, text in new.items() if text != page.read_text()]
    if {"--check", "--release"} & {*sys.argv}:
        outdated = [*complaints()]
        print("\n".join([*(f"{page.relative_to(ROOT)} is old: uv run tools/pages.py" for page in old), *outdated]))
        return bool(old or (outdated and "--release" in sys.argv))
    for page in old:
        page.write_text(new[page])
    picture = curves(read("drift/digits/report")[0]["survey"]["grids"], ("grid_sample", OURS), 6.4)
    picture.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
