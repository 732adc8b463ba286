"""The tests on every supported release, and the tests of timm under each mode: uv run nox -l.

uv run nox -s pairing                                    # all pairings, into results/versions/matrix.json
uv run nox -s "pairing(timm-1.0.16)" "pairing(timm-1.0.22)"
uv run nox -s timm_tests -- stock matmul                 # the installed release's own tests, under these modes (all)
uv run nox -s forced_stock                               # our own tests, where ours never runs: they must notice

Every session runs pytest by `uv run`, which adds the releases to this project's own environment. A
session's row in the result file is replaced, the other rows stay. ``pairing`` fails if any test
fails, ``timm_tests`` if one fails that passes under stock, or if ours never ran, ``forced_stock``
if one passes that asks for ours. With RESULTS=FOLDER the files go there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import nox

from timm_naflex_fast.measure.output import provenance

ROOT = Path(__file__).resolve().parent
nox.options.sessions = ["pairing", "timm_tests"]
# What `uv run` adds to the project's own environment, which has the newest of everything.
PAIRINGS = {
    f"timm-{v}": f"--with timm=={v}"
    for v in ("1.0.16", "1.0.18", "1.0.20", "1.0.22", "1.0.25", "1.0.28")
}
PAIRINGS |= {"newest": "", "torch-2.4": "--with torch==2.4.1 --with torchvision==0.19.1"}
PAIRINGS |= {"torch-2.11": "--with torch==2.11.0 --with torchvision==0.26.0"}
PAIRINGS |= {f"transformers-{v}": f"--with transformers=={v}.*" for v in ("5.21", "5.22", "5.23")}
PAIRINGS |= {f"python-{v}": f"--isolated --python {v}" for v in ("3.10", "3.13")}
# Folders and files of tests.
PATCH = ("handles", "compiled_choice", "transformers_models")
MODEL = ("models", "rope_models", "distributed", "dtensor")
LAYERS = {
    "operation": ("resampling", "batch", "strategies", "contract", "rope", "test_functional.py"),
    "patch": ("patching", *(f"behaviour/test_{name}.py" for name in PATCH)),
    "model": tuple(f"behaviour/test_{name}.py" for name in MODEL),
}
MODES = ("stock", "matmul", "interpolate_cached", "grid_sample")
TIMM_TESTS = [
    f"tests/test_{name}.py" for name in ("layers", "layers_pos_embed", "naflex_dataset", "models")
]
# Of the tests of models only those about NaFlex, without downloads and without models larger than
# base.
ABOUT_NAFLEX = "not test_models or (naflexvit and not (load_pretrained or giant or huge or large or so400m or so150m))"
# No other test of timm may fail where it passes unpatched. This one expects entries in timm's
# private cache of pseudo-inverses, which our patch kernels do not fill.
MAY_FAIL = "test_patch_embed_interpolator_reuses_nonpersistent_cache"
ABOUT = (
    "import importlib.metadata as m, json, platform; "
    "names = {d.name for d in m.distributions()} & {'timm', 'torch', 'transformers'}; "
    "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in names}}))"
)
# A plugin of pytest: each of its processes writes into the file "calls" beside it, how often each
# strategy ran.
WITNESS = """
from pathlib import Path

from timm_naflex_fast import status


def pytest_sessionfinish():
    with Path(__file__).with_name("calls").open("a") as file:
        for (_, strategy), count in status().calls.items():
            print(strategy, count, file=file)
"""


def typed(session: nox.Session) -> str:
    """The command that runs this session, as a shell takes it."""
    words = ["--", *session.posargs] if session.posargs else []
    return shlex.join(["uv", "run", "nox", "-s", session.name, *words])


def uv(session: nox.Session, extra: str, *command: str, **options: Any) -> Any:
    """Run a command by ``uv run`` with the options ``extra``."""
    return session.run("uv", "run", *extra.split(), *command, external=True, **options)


def run_pytest(session: nox.Session, extra: str, *arguments: str) -> dict[str, Any]:
    """The counts of one run of pytest, and the names of the tests that failed."""
    out = Path(session.create_tmp()).resolve() / "report.xml"
    out.unlink(missing_ok=True)
    start = "python -m pytest -p no:cacheprovider".split()
    uv(session, extra, *start, f"--junitxml={out}", *arguments, success_codes=[0, 1])
    suite = ElementTree.parse(out).getroot()[0]
    bad = [
        case
        for case in suite.iter("testcase")
        if {"failure", "error"} & {child.tag for child in case}
    ]
    tests, skipped, failed = int(suite.get("tests", 0)), int(suite.get("skipped", 0)), len(bad)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in bad]
    return {
        "passed": tests - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "failures": names,
    }


def keep(session: nox.Session, file: str, key: str, row: dict[str, Any], extra: str) -> None:
    """Put a row into a result file, in the place of the one with the same ``key``, with the
    versions that it ran on."""
    out = Path(os.environ.get("RESULTS", ROOT / "results" / "versions")) / file
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    versions = json.loads(
        uv(session, extra, "python", "-c", ABOUT, silent=True).strip().splitlines()[-1]
    )
    row |= {**provenance(typed(session)), **versions}
    rows = [row if old[key] == row[key] else old for old in rows]
    out.write_text(json.dumps({"rows": rows if row in rows else [*rows, row]}, indent=1) + "\n")


@nox.session(venv_backend="none")
@nox.parametrize("name", list(PAIRINGS), ids=list(PAIRINGS))
def pairing(session: nox.Session, name: str) -> None:
    """The layers of tests that touch the libraries, on one pairing of releases."""
    extra = PAIRINGS[name]
    folders = {layer: [f"tests/{path}" for path in paths] for layer, paths in LAYERS.items()}
    layers = {
        layer: run_pytest(session, extra, "-m", "not fuzz", *paths)
        for layer, paths in folders.items()
    }
    keep(session, "matrix.json", "pairing", {"pairing": name, "layers": layers}, extra)
    if failed := [test for counts in layers.values() for test in counts["failures"]]:
        session.error(f"failed: {failed}")


@nox.session(venv_backend="none")
@nox.parametrize("slow", [False, True], ids=["fast", "slow"])
def forced_stock(session: nox.Session, slow: bool) -> None:
    """Our own tests with the library's own code in place of ours: each that asks for ours has to
    fail."""
    chosen = ["-m", "slow and not fuzz" if slow else "not slow and not fuzz", *session.posargs]
    failed = run_pytest(session, "", "--tb=no", "-p", "tests.support.forced_stock", *chosen)[
        "failures"
    ]
    cases = ElementTree.parse(Path(session.create_tmp()) / "report.xml").iter("testcase")
    asking = [
        case
        for case in cases
        if case.find("properties/property[@name='asks for ours']") is not None
    ]
    names = {f"{case.get('classname')}.{case.get('name')}" for case in asking}
    green = sorted(names - {*failed})
    result = {"ask for ours": len(names), "red": len(names) - len(green), "green": green}
    file = "forced_stock_slow.json" if slow else "forced_stock.json"
    out = Path(os.environ.get("RESULTS", ROOT / "results" / "tests")) / file
    out.write_text(json.dumps({**provenance(typed(session)), **result}, indent=1) + "\n")
    if green or not names:
        session.error(f"{len(names)} ask for ours; green: {green}")


@nox.session(venv_backend="none")
def timm_tests(session: nox.Session) -> None:
    """timm's own tests about NaFlex, of the installed release, under each mode; ``stock`` tells
    what fails anyway."""
    folder = Path(session.create_tmp()).resolve()
    release = importlib.metadata.version("timm")
    source = ("pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"timm=={release}")
    uv(session, "--with pip --with setuptools", "python", "-m", *source, "--dest", str(folder))
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    # Beside the sdist's own timm folder the installed timm would be hidden, so the tests move away
    # from it.
    shutil.rmtree(folder / "tests", ignore_errors=True)
    shutil.move(folder / f"timm-{release}" / "tests", folder / "tests")
    shutil.copy(folder / f"timm-{release}" / "pyproject.toml", folder)
    known: list[str] = []
    plugin = (
        "-q",
        "-n",
        "auto",
        "-p",
        "witness",
        "-p",
        "timm_naflex_fast.pytest_plugin",
        "--naflex-mode",
    )
    (folder / "witness.py").write_text(WITNESS)
    session.env.update({"UV_PROJECT": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    session.chdir(folder)
    for mode in session.posargs or MODES:
        Path("calls").write_text("")
        counts = run_pytest(session, "", *plugin, mode, "-k", ABOUT_NAFLEX, *TIMM_TESTS)
        calls = [line.split() for line in Path("calls").read_text().splitlines()]
        counts["calls"] = sum(int(count) for strategy, count in calls if strategy == mode)
        known = counts["failures"] if mode == "stock" else known
        broken = [name for name in counts["failures"] if name not in known and MAY_FAIL not in name]
        keep(session, "timm_tests.json", "mode", {"mode": mode, **counts, "broken": broken}, "")
        print(f"{session.name} {mode}: {counts}")
        if broken:
            session.error(f"fail under {mode} alone: {broken}")
        if mode != "stock" and not counts["calls"]:
            session.error(f"{mode} never ran")
