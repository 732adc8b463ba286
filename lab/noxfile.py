"""The tests on every supported release, timm's own tests, and do tests notice?: uv run nox -f lab/noxfile.py -l.

    uv run nox -f lab/noxfile.py -s pairing                     # all pairings, into lab/results/versions/matrix.json
    uv run nox -f lab/noxfile.py -s "pairing(timm-1.0.16)"      # one of them
    uv run nox -f lab/noxfile.py -s timm_tests                  # the installed release's own tests, under each mode
    uv run nox -f lab/noxfile.py -s timm_tests -- stock matmul  # under these
    uv run nox -f lab/noxfile.py -s forced_stock                # our own tests, where ours never runs
    uv run nox -f lab/noxfile.py -s mutants -- 20 timm_naflex_fast/pos_embed tests/pos_embed  # 20 small changes of a room

Every session runs pytest by `uv run`, which adds the releases to this project's own environment. A
session's row in the result file is replaced, the other rows stay. With RESULTS=FOLDER the files go
there.

``pairing`` fails if any test fails. ``timm_tests`` fails if a test fails that passes under stock,
or if ours never ran. ``forced_stock`` fails if a test passes that asks for ours. ``mutants`` prints
what no test noticed, and goes on where it was interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sqlite3
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import nox

from timm_naflex_fast.commands.measure.output import code_version, provenance

ROOT = Path(__file__).resolve().parents[1]
nox.options.sessions = ["pairing", "timm_tests"]
# What `uv run` adds to the project's own environment, which has the newest of everything.
PAIRINGS = {
    "timm-1.0.16": "--with timm==1.0.16",
    "timm-1.0.18": "--with timm==1.0.18",
    "timm-1.0.20": "--with timm==1.0.20",
    "timm-1.0.22": "--with timm==1.0.22",
    "timm-1.0.25": "--with timm==1.0.25",
    "timm-1.0.28": "--with timm==1.0.28",
    "newest": "",
    "torch-2.4": "--with torch==2.4.1 --with torchvision==0.19.1",
    "torch-2.11": "--with torch==2.11.0 --with torchvision==0.26.0",
    "transformers-5.21": "--with transformers==5.21.*",
    "transformers-5.22": "--with transformers==5.22.*",
    "transformers-5.23": "--with transformers==5.23.*",
    "python-3.10": "--isolated --python 3.10",
    "python-3.13": "--isolated --python 3.13",
}
# The tests that touch a library, in layers. Paths are below tests/.
LAYERS = {
    "operation": (
        "pos_embed",
        "contract",
        "rope",
        "test_functional.py",
    ),
    "patch": (
        "patching",
        "behaviour/test_handles.py",
        "behaviour/test_compiled_choice.py",
    ),
    "model": (
        "behaviour/test_models.py",
        "behaviour/test_distributed.py",
        "behaviour/test_dtensor.py",
    ),
}
MODES = ("stock", "matmul", "interpolate_cached", "grid_sample")
TIMM_TESTS = (
    "tests/test_layers.py",
    "tests/test_layers_pos_embed.py",
    "tests/test_naflex_dataset.py",
    "tests/test_models.py",
)
# Of the tests of models only those about NaFlex, without downloads and without models larger than
# base.
NOT_RUN = "load_pretrained or giant or huge or large or so400m or so150m"
ABOUT_NAFLEX = f"not test_models or (naflexvit and not ({NOT_RUN}))"
# No other test of timm may fail where it passes unpatched. This one expects entries in timm's
# private cache of pseudo-inverses, which our patch kernels do not fill.
MAY_FAIL = "test_patch_embed_interpolator_reuses_nonpersistent_cache"
COSMIC_RAY = "--with cosmic-ray==8.7.0"
# For the session ``mutants``. One other operator in place of each, not all others: a test that
# notices the one notices them. And no change of types.
MUTATIONS = """
# {count} changes, at commit {commit}
[cosmic-ray]
module-path = "{part}"
timeout = 300.0
excluded-modules = []
test-command = "python -m pytest -x -n 0 -p no:cacheprovider --hypothesis-profile mutation {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = [
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul|Pow_Mul)",
    "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)",
]
"""
# A program that prints the releases of an environment as JSON.
ABOUT = (
    "import importlib.metadata as m, json, platform; "
    "names = {d.name for d in m.distributions()} & {'timm', 'torch', 'transformers'}; "
    "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in names}}))"
)


def typed(session: nox.Session) -> str:
    """The command that runs this session, as a shell takes it."""
    words = ["uv", "run", "nox", "-f", "lab/noxfile.py", "-s", session.name, "--"]
    return shlex.join([*words, *session.posargs])


def uv(session: nox.Session, extra: str, *command: str, **options: Any) -> Any:
    """Run a command by ``uv run`` with the options ``extra``."""
    return session.run("uv", "run", *extra.split(), *command, external=True, **options)


def name_of(case: ElementTree.Element) -> str:
    """A test's name in pytest's report."""
    return f"{case.get('classname')}.{case.get('name')}"


def is_red(case: ElementTree.Element) -> bool:
    """Whether a test failed or could not run."""
    return case.find("failure") is not None or case.find("error") is not None


def run_pytest(session: nox.Session, extra: str, *arguments: str) -> ElementTree.Element:
    """Run pytest; its report about the tests."""
    report = Path(session.create_tmp()).resolve() / "report.xml"
    command = ("python", "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}")
    uv(session, extra, *command, *arguments, success_codes=[0, 1])
    return ElementTree.parse(report).getroot()[0]


def counts_of(report: ElementTree.Element) -> dict[str, Any]:
    """The counts of one run of pytest, and the names of the tests that failed."""
    failures = [name_of(case) for case in report.iter("testcase") if is_red(case)]
    tests = int(report.get("tests", 0))
    skipped = int(report.get("skipped", 0))
    return {
        "passed": tests - skipped - len(failures),
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def result_file(name: str) -> Path:
    """A file of lab/results, or of the folder that RESULTS names."""
    return Path(os.environ.get("RESULTS", ROOT / "lab" / "results")) / name


def write(file: Path, record: dict[str, Any]) -> None:
    """Write a result file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


def keep(session: nox.Session, file: str, key: str, row: dict[str, Any], extra: str = "") -> None:
    """Put a row into a result file, with the releases that it ran on.

    It takes the place of the row with the same ``key``.
    """
    printed = uv(session, extra, "python", "-c", ABOUT, silent=True)
    releases = json.loads(printed.strip().splitlines()[-1])
    row |= {**provenance(typed(session)), **releases}

    out = result_file(file)
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = {row[key]: row for row in [*old, row]}
    write(out, {"rows": [*rows.values()]})


@nox.session(venv_backend="none")
@nox.parametrize("name", list(PAIRINGS), ids=list(PAIRINGS))
def pairing(session: nox.Session, name: str) -> None:
    """The layers of tests that touch the libraries, on one pairing of releases."""
    session.chdir(ROOT)  # nox runs sessions in the folder of this file
    extra = PAIRINGS[name]
    layers = {}
    failed = []
    for layer, paths in LAYERS.items():
        tests = [f"tests/{path}" for path in paths]
        counts = counts_of(run_pytest(session, extra, "-m", "not fuzz", *tests))
        layers[layer] = counts
        failed += counts["failures"]
    keep(session, "versions/matrix.json", "pairing", {"pairing": name, "layers": layers}, extra)
    if failed:
        session.error(f"failed: {failed}")


@nox.session(venv_backend="none")
def forced_stock(session: nox.Session) -> None:
    """Our own tests with the library's own code in place of ours: each that asks for ours fails."""
    session.chdir(ROOT)  # nox runs sessions in the folder of this file
    options = ("--tb=no", "-p", "tests.support.forced_stock", "-m", "not fuzz")
    report = run_pytest(session, "", *options, *session.posargs)

    # tests/support/forced_stock.py marks the tests that ask for ours.
    asks = "properties/property[@name='asks for ours']"
    asking = [case for case in report.iter("testcase") if case.find(asks) is not None]
    green = [name_of(case) for case in asking if not is_red(case)]
    result = {"ask for ours": len(asking), "red": len(asking) - len(green), "green": green}
    write(result_file("tests/forced_stock.json"), {**provenance(typed(session)), **result})
    if green or not asking:
        session.error(f"{len(asking)} ask for ours; green: {green}")


def calls_of(mode: str) -> int:
    """How often a mode's code ran, as tests/support/timm_suite.py wrote it."""
    total = 0
    for line in Path("calls").read_text().splitlines():
        strategy, count = line.split()
        if strategy == mode:
            total += int(count)
    return total


@nox.session(venv_backend="none")
def timm_tests(session: nox.Session) -> None:
    """timm's own tests about NaFlex under each mode; ``stock`` tells what fails anyway."""
    session.chdir(ROOT)  # nox runs sessions in the folder of this file
    folder = Path(session.create_tmp()).resolve()
    fetch = str(ROOT / "tests" / "support" / "timm_source.py")
    uv(session, "--with pip --with setuptools", "python", fetch, str(folder))
    # It is copied because ``tests.support`` would be looked for in timm's folder of tests.
    shutil.copy(ROOT / "tests" / "support" / "timm_suite.py", folder)
    session.env.update({"UV_PROJECT": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    session.chdir(folder)

    options = ("-q", "-n", "auto", "-p", "timm_suite", "-k", ABOUT_NAFLEX)
    fail_anyway: list[str] = []
    for mode in session.posargs or MODES:
        Path("calls").write_text("")
        report = run_pytest(session, "", *options, "--naflex-mode", mode, *TIMM_TESTS)
        counts = counts_of(report)
        counts["calls"] = calls_of(mode)
        if mode == "stock":
            fail_anyway = counts["failures"]
        broken = []
        for name in counts["failures"]:
            if name not in fail_anyway and MAY_FAIL not in name:
                broken.append(name)
        keep(session, "versions/timm_tests.json", "mode", {"mode": mode, **counts})
        if broken:
            session.error(f"fail under {mode} alone: {broken}")
        if mode != "stock" and not counts["calls"]:
            session.error(f"{mode} never ran")


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """COUNT PART TESTS...: small changes of a file or folder, drawn at random, by Cosmic Ray.

    lab/results/tests/mutants.json gets those that TESTS did not notice. After an interrupt the same
    command goes on, if the commit is the same.
    """
    session.chdir(ROOT)  # nox runs sessions in the folder of this file
    count, part, *tests = session.posargs
    commit = code_version()
    wanted = MUTATIONS.format(commit=commit, count=count, part=part, tests=" ".join(tests))

    # It writes each change into the file, so it gets a copy, and Python finds the copy first.
    folder = Path(session.create_tmp()).resolve()
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    session.env.update(UV_PROJECT=str(ROOT), PYTHONPATH=str(copy), OMP_NUM_THREADS="1")
    session.chdir(copy)

    settings = folder / "mutants.toml"
    found = folder / "found.sqlite"
    drawn = folder / "drawn.sqlite"
    if not drawn.exists() or settings.read_text() != wanted:
        drawn.unlink(missing_ok=True)
        found.unlink(missing_ok=True)
        settings.write_text(wanted)
        uv(session, COSMIC_RAY, "cosmic-ray", "baseline", str(settings))  # unchanged, they pass
        uv(session, COSMIC_RAY, "cosmic-ray", "init", str(settings), str(found))
        uv(session, COSMIC_RAY, "cr-filter-operators", str(found), str(settings))
        with sqlite3.connect(found) as database:
            chosen = (
                "SELECT job_id FROM work_items WHERE job_id NOT IN (SELECT job_id FROM work_results) "
                "ORDER BY random() LIMIT ?"
            )
            database.execute(f"CREATE TABLE chosen AS {chosen}", [int(count)])
            for table in ("work_results", "mutation_specs", "work_items"):
                database.execute(f"DELETE FROM {table} WHERE job_id NOT IN (SELECT * FROM chosen)")
        found.rename(drawn)

    uv(session, COSMIC_RAY, "cosmic-ray", "exec", str(settings), str(drawn))
    report = ("cr-report", "--surviving-only", "--show-diff", str(drawn))
    survivors = uv(session, f"-q {COSMIC_RAY}", *report, silent=True)
    print(survivors)
    keep(session, "tests/mutants.json", "part", {"part": part, "report": survivors.splitlines()})
    drawn.unlink()
