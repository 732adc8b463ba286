"""Run the tests on every supported timm, and the newest timm on the oldest torch; keep what passed, failed or was left.

uv run tools/version_matrix.py                          # everything, into results/versions/matrix.json
uv run tools/version_matrix.py --timm 1.0.16 1.0.22     # these again, the other rows stay; status 1 if a test failed
uv run tools/version_matrix.py --timm-tests DIR         # timm's own tests in a checkout of it, under every mode
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
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "versions"
NEWEST = "newest"
OLDEST_TORCH = ["torch==2.4.1", "torchvision==0.19.1"]
# What uv lays over the project's own environment, which has the newest of everything.
PAIRINGS: dict[str, list[str]] = {
    **{v: [f"timm=={v}"] for v in ("1.0.16", "1.0.18", "1.0.20", "1.0.22", "1.0.25", "1.0.28")},
    NEWEST: [],
    "oldest-torch": ["timm", *OLDEST_TORCH],
}
LAYERS = {"operation": ("resampling", "rope"), "patch": ("patching",), "model": ("models",)}  # folders of tests
MODES = ("stock", "matmul", "interpolate_cached", "grid_sample")
TIMM_TESTS = "tests/test_layers.py tests/test_layers_pos_embed.py tests/test_models.py tests/test_naflex_dataset.py"
# Not the test that downloads weights, and of the models none larger than base: they are the same code.
LARGER = "giant or huge or large or so400m or so150m"
ABOUT_NAFLEX = f"(naflex or PatchEmbed or resampl) and not (load_pretrained or {LARGER})"
ABOUT = (
    "import importlib.metadata as m, json, platform; "
    "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in ('timm', 'torch')}}))"
)


def uv(extra: list[str], *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's environment with ``extra`` requirements laid over it."""
    over = [part for requirement in extra for part in ("--with", requirement)]
    return subprocess.run(["uv", "run", *over, *command], text=True, **{"cwd": ROOT} | options)


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


def run_timms_tests(checkout: Path, modes: list[str]) -> dict[str, Any]:
    """timm's own tests about NaFlex, from a checkout or unpacked sdist of the installed release, under each mode."""
    about = json.loads(uv([], "python", "-c", ABOUT, check=True, stdout=subprocess.PIPE).stdout)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:  # beside the checkout's own timm the installed one would be hidden
        for name in ("tests", "pyproject.toml"):
            source = checkout / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder) / name)
        for mode in modes:
            how = ["-q", "-p", "timm_naflex_fast.pytest_plugin", "--naflex-mode", mode, "-k", ABOUT_NAFLEX]
            environment = os.environ | {"UV_PROJECT": str(ROOT)}
            counts, failed = pytest([], [*how, *TIMM_TESTS.split()], cwd=folder, env=environment)
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
    lines = [f"| timm | torch | Python | {' | '.join(LAYERS)} |", "| --- " * (3 + len(LAYERS)) + "|"]
    for row in rows:
        cells = [words(row["layers"][layer]) if layer in row["layers"] else "" for layer in LAYERS]
        lines.append(f"| {row['timm']} | {row['torch']} | {row['python']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", about_line(rows)])


def render_timms_tests() -> str:
    """The table of timm's own tests under each mode, from the result file."""
    modes = json.loads((RESULTS / "timm_tests.json").read_text())
    lines = [f"| timm {next(iter(modes.values()))['timm']}'s own tests about NaFlex | result |", "| --- | --- |"]
    lines += [f"| `{mode}` | {words(counts)} |" for mode, counts in modes.items()]
    return "\n".join([*lines, "", about_line(modes.values(), " --timm-tests DIR")])


def main() -> int:
    """Run what the options name; returns 1 if a test failed (of timm's own: one that passes unpatched)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", nargs="+", choices=PAIRINGS, default=list(PAIRINGS), help="which pairings (all)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="which layers (all)")
    parser.add_argument("--timm-tests", type=Path, metavar="DIR", help="run timm's tests in there instead")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="with --timm-tests: which (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (results/versions/)")
    options = parser.parse_args()
    if options.timm_tests:
        out = options.out or RESULTS / "timm_tests.json"
        keep(out, run_timms_tests(options.timm_tests, options.modes), MODES)
        modes = json.loads(out.read_text())
        known = set(modes.get("stock", {"failures": []})["failures"])
        broken = {mode: sorted(set(counts["failures"]) - known) for mode, counts in modes.items()}
        print(json.dumps({"fail with us alone": broken}, indent=2))
        return int(any(broken.values()))
    status = 0
    for name in options.timm:
        row = {**run_pairing(PAIRINGS[name], options.layers), **made()}
        keep(options.out or RESULTS / "matrix.json", {name: row}, PAIRINGS)  # as far as it has come
        for layer, counts in row["layers"].items():
            status |= counts["failed"] > 0
            print(f"timm {row['timm']}, torch {row['torch']}, {layer}: {counts}", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
