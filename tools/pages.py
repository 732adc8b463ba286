"""Write the tables of the pages and the picture of drift from results/: uv run tools/pages.py.

With --check nothing is written: pages that differ from the result files are an error, and what
`complaints` finds is listed. With --release that is an error too.

No figure is typed by hand. What stands in a page between `<!-- NAME: begin -->` and `<!-- NAME: end
-->` is made by the entry NAME of RACES, or by the function NAME. The command that made a result
file stands in it.
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
from typing import Any, NamedTuple

from tabulate import tabulate

import timm_naflex_fast
from timm_naflex_fast import functional
from timm_naflex_fast.measure.bench.race import times_faster
from timm_naflex_fast.measure.contenders import BASELINE, CONTENDERS, PLAIN_ADD
from timm_naflex_fast.measure.drift.plots import curves
from timm_naflex_fast.measure.drift.report import HEADINGS, row_text
from timm_naflex_fast.measure.drift.survey import Drift
from timm_naflex_fast.measure.output import number
from timm_naflex_fast.patching.install import Handle, Status

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LEAST = 0.9  # of the library's own speed: what is slower stops a release
OURS = "matmul"
ORIGIN = ("machine", "torch", "timm", "date", "commit")
# What figures depend on, in the package: where it changes, they are old.
CODE = [
    f"timm_naflex_fast/{room}"
    for room in "resampling strategies backends patching rope patch_embed".split()
]
CODE += [
    f":!timm_naflex_fast/patching/{name}.py" for name in ("install", "compat", "status")
]  # no step runs them
TESTED = [
    "timm_naflex_fast",
    ":!timm_naflex_fast/cli",
    ":!timm_naflex_fast/measure",
]  # by versions/ and tests/
Race = dict[str, dict[str, Any]]  # rows by contender
Column = Callable[[Race], Any]


def read(pattern: str) -> list[Any]:
    """The result files that exist, each with its name."""
    paths = sorted(RESULTS.glob(f"{pattern}.json"))
    return [
        {**json.loads(path.read_text()), "again": str(path.relative_to(RESULTS).with_suffix(""))}
        for path in paths
    ]


def outdated(abouts: Iterable[dict[str, Any]], code: Sequence[str]) -> Iterator[str]:
    """The commits of figures or tests, if the code that they depend on has changed since, beyond
    its comments."""
    for commit in dict.fromkeys(about["commit"] for about in abouts):
        diff = git("diff", "--name-only", commit, "HEAD", "--", *code)
        if diff is None or any(
            parsed(commit, name) != parsed("HEAD", name) for name in diff.split()
        ):
            yield f"its code has changed since {commit}"


def git(*arguments: str) -> str | None:
    """What git prints about this project; None: it cannot."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout


def parsed(commit: str, name: str) -> str:
    """A file of a commit as Python reads it, without comments."""
    text = git("show", f"{commit}:{name}")
    return "" if text is None else ast.dump(ast.parse(text))


def lost_races(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Races in which this package is slower than the library's own code."""
    text = "{workload} {phase} B={batch} {contender} has {times_faster:.2f} of the library's speed"
    ours = (row for row in rows if not row["contender"].startswith(("timm-", PLAIN_ADD)))
    return (
        text.format(**row)
        for row in ours
        if row["times_faster"] is not None and row["times_faster"] < LEAST
    )


def failed_tests(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Our tests that fail on a pairing of releases, and timm's that fail under a mode but not under
    stock."""
    for row in rows:
        ours = [name for counts in row.get("layers", {}).values() for name in counts["failures"]]
        yield from (f"{name} fails" for name in [*ours, *row.get("broken", [])])


def complaints() -> Iterator[str]:
    """Figures and tests whose code has changed since, races that are lost, and tests that fail or
    notice nothing."""
    for record in read("**/*"):
        match record["again"].split("/"):
            case ["versions", _]:  # each row was made by itself
                lines = [*outdated(record["rows"], TESTED), *failed_tests(record["rows"])]
            case ["tests", _]:
                lines = [
                    *outdated([record], TESTED),
                    *(f"{name} passes without ours" for name in record["green"]),
                ]
            case ["drift", *_]:
                lines = [*outdated([record["made"]], CODE)]
            case [
                "counts" | "graphs" | "exported"
            ]:  # nothing is timed; timm's loop cannot be exported
                lines = [*outdated([record], CODE)]
            case _:
                lines = [*outdated([record], CODE), *lost_races(record["rows"])]
        yield from (f"results/{record['again']}.json: {line}" for line in lines)


def races(pattern: str, by: Iterable[str]) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed, and by contender."""
    by_facts: dict[tuple[Any, ...], Race] = {}
    for record in read(pattern):
        for row in record["rows"]:
            name, about = row["contender"], row.get("about", {})
            full = {**record, **about, **about.get("counted", {}).get(name, {}), **row}
            by_facts.setdefault(tuple(full[key] for key in by), {})[name] = full
    return by_facts


def table(
    headings: Sequence[str],
    lines: Iterable[Sequence[Any]],
    abouts: Sequence[Any],
    command: str = "",
) -> str:
    """A table, where its figures come from (each fact once where the files agree), and what
    measures them again."""
    text = tabulate(
        [[*map(str, line)] for line in lines], headings, tablefmt="github", disable_numparse=True
    )
    origin = [
        " / ".join(dict.fromkeys(str(about.get(fact, "not kept")) for about in abouts))
        for fact in ORIGIN
    ]
    again = (
        command or f"uv run benchmarks/measure.py {' '.join(about['again'] for about in abouts)}"
    )
    return "{}\n\n{}; torch {}, timm {}; {}, commit {}; `{}`.".format(text, *origin, again)


def ms(contender: str) -> Column:
    """Milliseconds."""
    return lambda race: race[contender]["median_ms"] if contender in race else math.nan


def ratio(slow: str, fast: str = OURS) -> Column:
    """How many times as long the one takes."""
    return lambda race: ms(slow)(race) / ms(fast)(race)


def figure(name: str, unit: float | None = None) -> Column:
    """A figure of a race that has one contender."""
    return lambda race: (
        next(iter(race.values()))[name] if unit is None else next(iter(race.values()))[name] / unit
    )


def share(contender: str) -> Column:
    """The embeddings' share of a step."""
    return lambda race: f"{100 * race[contender]['embeds_share'][contender]:.1f} %"


def cell(value: Any) -> str:
    """A value of a column as text; "-" for what was not measured."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


STEP = ("workload", "phase", "batch")
FASTER = {
    "times faster than timm": ratio(BASELINE),
    "than timm's grid_sample": ratio("timm-flag-bilinear"),
}
FASTER |= {"times one plain add": ratio(OURS, PLAIN_ADD)}
POSITION = FASTER | {
    f"`{mode}` than timm": ratio(BASELINE, mode) for mode in ("interpolate_cached", "grid_sample")
}
SAVED: dict[str, Column] = {"timm, ms": ms(BASELINE), "`matmul`, ms": ms(OURS)}
SAVED |= {"times faster than timm": lambda race: times_faster(race[BASELINE], race[OURS])}
SAVED |= {"embeddings' share, timm": share(BASELINE), "`matmul`": share(OURS)}
COUNTS = {"waits for the device": figure("host_waits"), "operators": figure("operators")}
COUNTS |= {"read, GB": figure("read", 1e9), "written, GB": figure("written", 1e9)}
COUNTS |= {"peak beyond x, GB": figure("peak", 1e9)}
ROPE = {
    "timm, ms": ms(BASELINE),
    "batched, ms": ms("batched"),
    "times faster": ratio(BASELINE, "batched"),
}
GRAPHS = ("graphs", "breaks", "graphs after the first batch", "first steps, s")
COMPILED = {name: figure(name) for name in GRAPHS} | {"a later step, ms": figure("median_ms")}
EXPORTED = {"timm's loop, ms": ms(BASELINE), "timm's grid_sample": ms("timm-flag-bicubic")}
EXPORTED |= {f"exported, {name}": ms(name) for name in ("torch.export", "ONNX Runtime", "OpenVINO")}
SIGLIP2 = {
    "transformers, ms": ms(BASELINE),
    "`interpolate_cached`": ms("interpolate_cached"),
    "`matmul`": ms(OURS),
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


RACES = {
    "speed": Section(
        "speed/*", (*STEP, "dtype"), FASTER, [{"siglip", 64, "float32"}, {"diverse", 64, "float32"}]
    ),
    "position": Section("speed/*", (*STEP, "dtype"), POSITION),
    "model_short": Section(
        "model/*", ("model", *STEP), SAVED, [{"naflexvit_base_patch16_siglip"}, {64}]
    ),
    "model": Section("model/*", ("model", *STEP), SAVED),
    "counts_short": Section("counts", (*STEP, "contender"), COUNTS, LARGE),
    "counts": Section("counts", (*STEP, "contender"), COUNTS),
    "patch_embed": Section(
        "patch_kernels", ("workload", "phase"), {"times faster than timm": ratio(BASELINE)}
    ),
    "compiled": Section("compiled", ("workload", "phase", "contender"), COMPILED),
    "exported": Section("exported", ("part", *STEP), EXPORTED),
    "rope": Section("rope", STEP, ROPE),
    "other_libraries": Section(
        "other_libraries", STEP, SIGLIP2 | {"times faster": ratio(BASELINE)}
    ),
}


def race_table(name: str) -> str:
    """One of RACES."""
    files, by, columns, needed = RACES[name]
    shown = {
        key: race
        for key, race in races(files, by).items()
        if any(facts <= {*key} for facts in needed)
    }
    lines = [
        [", ".join(map(str, key)), *(cell(of(race)) for of in columns.values())]
        for key, race in shown.items()
    ]
    return table([", ".join(by), *columns], lines, read(files))


def model_sentence() -> str:
    """What a whole step can gain at most."""
    rows = [row for record in read("model/*") for row in record["rows"]]
    shares, most = (
        [100 * row["about"]["embeds_share"][BASELINE] for row in rows],
        max(row["batch"] for row in rows),
    )
    advice = "**Do not expect** a faster step on a CPU without `torch.compile`: in the models measured, with up to"
    return f"{advice} {most} images,\ntimm's embeddings are {min(shares):.1f} to {max(shares):.1f} % of it."


def never_slower() -> str:
    """The smallest ratio to timm in any race of the position embeddings, of the two modes that keep
    timm's result."""
    timed = races("speed/*", (*STEP, "dtype")).values()
    least = {name: min(map(ratio(BASELINE, name), timed)) for name in (OURS, "interpolate_cached")}
    modes = " and ".join(
        f"`{name}` at least {number(value)} times" for name, value in least.items()
    )
    return (
        f"In {len(timed)} races of the position embeddings alone, {modes} as fast as timm's loop."
    )


def graphs() -> str:
    """What the compiler makes of each mode."""
    modes: dict[tuple[str, str], dict[str, str]] = {}
    (record,) = read("graphs")
    for row in record["rows"]:
        text = (
            "works"
            if row["way"] in ("fullgraph=True", "export")
            else "{graphs} / {breaks} / {recompiled}"
        )
        ways = modes.setdefault((row["library"], f"`{row['contender']}`"), {})
        ways[row["way"]] = "fails" if "error" in row else text.format(**row)
    return table(
        ["model", "mode", *ways], [[*key, *ways.values()] for key, ways in modes.items()], [record]
    )


def first_screen() -> str:
    """What decides whether to install it: compiled and exported, and how far the embeddings are
    from timm's."""
    (record,), (report,) = read("graphs"), read("drift/digits/report")
    rows = {
        (row["contender"], row["way"]): row for row in record["rows"] if row["library"] == "timm"
    }
    sampled = ("timm's grid_sample", "timm-flag-bicubic")  # the digits' table is bicubic
    ways = {
        "timm": (BASELINE, BASELINE),
        "timm's `grid_sample`": sampled,
        "this package": (OURS, OURS),
    }
    lines = []
    for name, (contender, way) in ways.items():
        moved = 100 * report["survey"]["drift"][way]["embed_rel_rms"]
        compiled, exported = (rows[contender, how] for how in ("compile, four lengths", "export"))
        embeddings = f"off by {moved:.1f} % (digits)" if moved > 1e-4 else "equal but for rounding"
        works = "fails" if "error" in exported else "works"
        lines.append(
            [
                name,
                compiled["graphs"],
                compiled["breaks"],
                works,
                embeddings if moved else "reference",
            ]
        )
    headings = ["20 training batches of 4 lengths", "graphs", "breaks", "export", "embeddings"]
    again = f"uv run benchmarks/measure.py graphs`, `{report['made']['command']}"
    return table(headings, lines, [record, report["made"]], again)


def drift_peers() -> str:
    """The table of drift on the digits."""
    (report,) = read("drift/digits/report")
    drifts = report["survey"]["drift"].items()
    lines = [
        [f"`{name}`", CONTENDERS[name], *row_text(Drift(**drift), HEADINGS)]
        for name, drift in drifts
    ]
    return table(
        ["mode", "what it is", *HEADINGS.values()],
        lines,
        [report["made"]],
        report["made"]["command"],
    )


def words(run: dict[str, Any]) -> str:
    """Counts of one run of pytest."""
    return f"{run['passed']} passed, {f'**{n} failed**, ' if (n := run['failed']) else ''}{run['skipped']} skipped"


def versions() -> str:
    """The tests on every pairing of releases."""
    names, rows = (
        ("timm", "torch", "transformers", "python", "commit"),
        read("versions/matrix")[0]["rows"],
    )
    lines = [
        [*(row.get(name, "") for name in names), *map(words, row["layers"].values())]
        for row in rows
    ]
    return table([*names, *rows[0]["layers"]], lines, rows, "uv run nox -s pairing")


def timm_tests() -> str:
    """timm's own tests under each mode."""
    rows = read("versions/timm_tests")[0]["rows"]
    lines = [[f"`{row['mode']}`", words(row)] for row in rows]
    return table(["mode", "timm's own tests"], lines, rows, "uv run nox -s timm_tests")


def api() -> str:
    """Each public function: its call, and the first sentence of its docstring; and what two of them
    return."""
    parts, returned = [], (Handle, Status)
    for module, names in (
        (timm_naflex_fast, ("enable", "disable", "status")),
        (functional, functional.__all__),
    ):
        for name in names:
            function = getattr(module, name)
            told = inspect.signature(function)
            taken = [p.replace(annotation=p.empty) for p in told.parameters.values()]
            call = str(told.replace(parameters=taken)).replace(", *,", ",\n    *,")
            for cls in returned:
                call = call.replace(f"{cls.__module__}.", "")
            sentence = " ".join(str(function.__doc__).split("\n\n")[0].split())
            parts.append(
                f"### `{module.__name__}.{name}`\n\n```text\n{name}{call}\n```\n\n{sentence}"
            )
    return "\n\n".join(
        [*parts, *(f"### `{cls.__name__}`\n\n{inspect.getdoc(cls)}" for cls in returned)]
    )


FUNCTIONS = (
    first_screen,
    graphs,
    model_sentence,
    never_slower,
    drift_peers,
    versions,
    timm_tests,
    api,
)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; tell which pages are old"
    )
    parser.add_argument(
        "--release", action="store_true", help="as --check; any complaint is an error"
    )
    options = parser.parse_args()
    new = {page: fill(page.read_text()) for page in PAGES}
    old = [page for page, text in new.items() if text != page.read_text()]
    if options.check or options.release:
        wrong = [*complaints()]
        print(
            "\n".join(
                [
                    *(f"{page.relative_to(ROOT)} is old: uv run tools/pages.py" for page in old),
                    *wrong,
                ]
            )
        )
        return bool(old or (wrong and options.release))
    for page in old:
        page.write_text(new[page])
    picture = curves(read("drift/digits/report")[0]["survey"]["grids"], ("grid_sample", OURS), 6.4)
    picture.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
