"""Run the tests on every supported timm, torch and Python, and timm's own tests under every mode; keep the counts.

uv run tools/version_matrix.py                             # every pairing, into results/versions/matrix.json
uv run tools/version_matrix.py --pairing 1.0.16 1.0.22     # these again, the other rows stay; status 1 if a test failed
uv run tools/version_matrix.py --timm-tests 1.0.31         # the tests in that release's sdist, into timm_tests.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "versions"
# What `uv run` adds to the project's own environment, which has the newest of everything.
PAIRINGS: dict[str, list[str]] = {
    **{v: ["--with", f"timm=={v}"] for v in ("1.0.16", "1.0.18", "1.0.20", "1.0.22", "1.0.25", "1.0.28")},
    "newest": [],
    "torch-2.4": ["--with", "torch==2.4.1", "--with", "torchvision==0.19.1"],
    # Triton 3.6's interpreter does not run on numpy 2.4.
    "torch-2.11": [
        *("--with", "torch==2.11.0", "--with", "torchvision==0.26.0", "--with", "triton==3.6.0", "--with", "numpy<2.4")
    ],
    **{f"transformers-{v}": ["--with", f"transformers=={v}.*"] for v in ("5.21", "5.22")},
    "python-3.10": ["--isolated", "--python", "3.10"],
    "python-3.13": ["--isolated", "--python", "3.13"],
}
LAYERS = {"operation": ("resampling", "rope"), "patch": ("patching",), "model": ("models",)}  # folders of tests
MODES = ("stock", "matmul", "interpolate_cached", "grid_sample")
TIMM_TESTS = [f"tests/test_{name}.py" for name in ("layers", "layers_pos_embed", "naflex_dataset", "models")]
# Of the tests of models only those about NaFlex, without downloads and without models larger than base.
ABOUT_NAFLEX = "not test_models or (naflexvit and not (load_pretrained or giant or huge or large or so400m or so150m))"
# No other test of timm may fail where it passes unpatched. This one expects entries in timm's private cache of
# pseudo-inverses, which our patch kernels do not fill.
MAY_FAIL = {"test_patch_embed_interpolator_reuses_nonpersistent_cache"}
ABOUT = (
    "import importlib.metadata as m, json, platform; "
    "names = 'timm', 'torch', 'transformers'; "
    "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in names}}))"
)


def uv(extra: list[str], *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command by ``uv run`` with the options ``extra``, in the project's folder if not told otherwise."""
    return subprocess.run(["uv", "run", *extra, *command], text=True, **{"cwd": ROOT} | options)


def pytest(extra: list[str], arguments: list[str], **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The counts and seconds of one run of pytest, and the names of the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.xml"
        uv(extra, "pytest", "-p", "no:cacheprovider", f"--junitxml={out}", *arguments, **options)
        if not out.exists():
            raise SystemExit(f"pytest did not run: {' '.join(arguments)}")
        suite = ElementTree.parse(out).getroot()[0]
    bad = [case for case in suite.iter("testcase") if {"failure", "error"} & {child.tag for child in case}]
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    counts = {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "seconds": round(float(suite.get("time", 0))),
    }
    return counts, [f"{case.get('classname')}.{case.get('name')}" for case in bad]


def run_pairing(extra: list[str], layers: list[str]) -> dict[str, Any]:
    """Versions and counts of one pairing of timm and torch."""
    about = json.loads(uv(extra, "python", "-c", ABOUT, check=True, stdout=subprocess.PIPE).stdout)
    results = {}
    for layer in layers:
        files = [f"tests/{folder}" for folder in LAYERS[layer]]
        results[layer], failed = pytest(extra, ["-m", "not fuzz", *files])
        results[layer]["failures"] = failed
    return {**about, "layers": results}


def run_timms_tests(release: str, modes: list[str]) -> dict[str, Any]:
    """timm's own tests about NaFlex, from the sdist of that release, under each mode."""
    extra = ["--with", f"timm=={release}"]
    about = json.loads(uv(extra, "python", "-c", ABOUT, check=True, stdout=subprocess.PIPE).stdout)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = ("pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"timm=={release}")
        uv(["--with", "pip"], "python", "-m", *source, "--dest", str(folder), check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        # Beside the sdist's own timm folder the installed timm would be hidden, so the tests move away from it.
        shutil.move(folder / f"timm-{release}" / "tests", folder / "tests")
        shutil.move(folder / f"timm-{release}" / "pyproject.toml", folder)
        for mode in modes:
            how = [
                "-q",
                "-n",
                "auto",
                "-p",
                "timm_naflex_fast.pytest_plugin",
                "--naflex-mode",
                mode,
                "-k",
                ABOUT_NAFLEX,
            ]
            environment = os.environ | {"UV_PROJECT": str(ROOT), "OMP_NUM_THREADS": "1"}
            counts, failed = pytest(extra, [*how, *TIMM_TESTS], cwd=folder, env=environment)
            found[mode] = {**about, **made(), **counts, "failures": failed}
    return found


def made() -> dict[str, str]:
    """When, where and from which commit a row comes."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT, stdout=subprocess.PIPE).stdout
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU used"
    return {"date": datetime.date.today().isoformat(), "commit": commit.strip(), "machine": machine}


def keep(out: Path, rows: dict[str, Any], order: Iterable[str]) -> None:
    """Write ``rows`` into the file, in the place of those of the same name that it has."""
    kept = json.loads(out.read_text()) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    merged = {name: {**kept, **rows}[name] for name in order if name in {**kept, **rows}}
    out.write_text(json.dumps(merged, indent=2) + "\n")


def words(counts: dict[str, Any]) -> str:
    """Counts of one run of pytest in a table's cell."""
    failed = f", **{counts['failed']} failed**" if counts["failed"] else ""
    return f"{counts['passed']} passed{failed}, {counts['skipped']} skipped"


def about_line(rows: Iterable[dict[str, Any]], options: str = "") -> str:
    """Where the rows come from, once where they agree."""

    def each(key: str) -> str:
        return " / ".join(dict.fromkeys(row[key] for row in rows))

    return f"{each('machine')}; {each('date')}, commit {each('commit')}; `uv run tools/version_matrix.py{options}`."


def render() -> str:
    """The table of versions, from the result file."""
    rows = json.loads((RESULTS / "matrix.json").read_text()).values()
    lines = [f"| timm | torch | transformers | Python | {' | '.join(LAYERS)} |", "| --- " * (4 + len(LAYERS)) + "|"]
    for row in rows:
        cells = [words(row["layers"][layer]) if layer in row["layers"] else "" for layer in LAYERS]
        versions = (row.get(name, "") for name in ("timm", "torch", "transformers", "python"))
        lines.append(f"| {' | '.join([*versions, *cells])} |")
    return "\n".join([*lines, "", about_line(rows)])


def render_timms_tests() -> str:
    """The table of timm's own tests under each mode, from the result file."""
    modes = json.loads((RESULTS / "timm_tests.json").read_text())
    lines = [f"| timm {next(iter(modes.values()))['timm']}'s own tests about NaFlex | result |", "| --- | --- |"]
    lines += [f"| `{mode}` | {words(counts)} |" for mode, counts in modes.items()]
    return "\n".join([*lines, "", about_line(modes.values(), f" --timm-tests {next(iter(modes.values()))['timm']}")])


def main() -> int:
    """Run what the options name; returns 1 if a test failed (of timm's own: one that passes unpatched)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairing", nargs="+", choices=PAIRINGS, default=list(PAIRINGS), help="which pairings (all)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="which layers (all)")
    parser.add_argument("--timm-tests", metavar="RELEASE", help="run the tests of timm's sdist instead")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="with --timm-tests: which (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (results/versions/)")
    options = parser.parse_args()
    if options.timm_tests:
        out = options.out or RESULTS / "timm_tests.json"
        keep(out, run_timms_tests(options.timm_tests, options.modes), MODES)
        rows = json.loads(out.read_text())
        known = set(rows.get("stock", {"failures": []})["failures"])
        broken = {mode: sorted(set(row["failures"]) - known) for mode, row in rows.items()}
        unexpected = {
            mode: [name for name in names if name.rsplit(".", 1)[1].split("[")[0] not in MAY_FAIL]
            for mode, names in broken.items()
        }
        print(json.dumps({"fail with us alone": broken, "and may not": unexpected}, indent=2))
        for mode, row in rows.items():
            print(f"timm {row['timm']}'s own tests, {mode}: {words(row)}")
        return int(any(unexpected.values()))
    status = 0
    for name in options.pairing:
        row = {**run_pairing(PAIRINGS[name], options.layers), **made()}
        keep(options.out or RESULTS / "matrix.json", {name: row}, PAIRINGS)  # as far as it has come
        for layer, counts in row["layers"].items():
            status |= counts["failed"] > 0
            print(f"timm {row['timm']}, torch {row['torch']}, Python {row['python']}, {layer}: {counts}", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
