"""Run transformers' own tests of the models that we patch, unpatched and under each mode; keep the counts.

uv run tools/transformers_tests.py CHECKOUT     # of transformers; into results/versions/transformers_tests.json

transformers publishes, in its sdist, the classes that the tests of its models build on, but not those tests. So these
come from the checkout, and the published classes of the installed release take the place of the checkout's.
The status is 1 if a test failed under a mode and not unpatched, or if a mode was never used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from version_matrix import RESULTS, ROOT, keep, made, pytest, uv, words

MODES = ("stock", "matmul", "interpolate_cached")
MODELS = ("siglip2", "lfm2_vl", "cosmos3_edge", "radio", "hunyuan_vl")
NEEDS = ("parameterized", "accelerate", "requests", "httpx", "pytest-env", "pytest-timeout")
# Each process of pytest adds a line: how often each code ran.
WITNESS = """
from pathlib import Path
from timm_naflex_fast import status
def pytest_sessionfinish():
    with Path(__file__).with_name("calls").open("a") as file:
        file.writelines(f"{who} {count}\\n" for (_, who), count in status().calls.items())
"""


def lay_out(checkout: Path, folder: Path, release: str) -> None:
    """Put the tests of the checkout and those of the sdist into ``folder``, beside a link to the installed package."""
    for name in ("tests", "utils"):
        shutil.copytree(checkout / name, folder / name)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(checkout / name, folder)
    source = ("pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"transformers=={release}")
    uv(["--with", "pip", "--with", "setuptools"], "python", "-m", *source, "--dest", str(folder), check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(folder / f"transformers-{release}" / "tests", folder / "tests", dirs_exist_ok=True)
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    (folder / "src").mkdir()
    (folder / "src" / "transformers").symlink_to(Path(package.origin).parent)
    (folder / "tests" / "models" / "conftest.py").write_text(WITNESS)


def run(checkout: Path) -> dict[str, Any]:
    """Versions, counts and failures under each mode."""
    about = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    extra = [part for name in NEEDS for part in ("--with", name)]
    environment = os.environ | {"UV_PROJECT": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(checkout, folder, about["transformers"])
        files = [f"tests/models/{model}/test_modeling_{model}.py" for model in MODELS]
        calls = folder / "tests" / "models" / "calls"
        for mode in MODES:
            how = ["-q", "-n", "auto", "-W", "ignore", "-p", "timm_naflex_fast.pytest_plugin"]
            how += ["--naflex-library", "transformers", "--naflex-mode", mode]
            counts, failed = pytest(extra, [*how, *files], cwd=folder, env=environment)
            ran = sum(int(line.split()[1]) for line in calls.read_text().splitlines() if line.startswith(mode))
            calls.unlink()
            only = sorted(set(failed) - set(rows["stock"]["failures"])) if rows else []
            rows[mode] = {**about, **made(), **counts, "calls": ran, "failures": failed, "only under this mode": only}
    return rows


def main() -> int:
    """Run and keep them; returns 1 if a mode broke a test or was never used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with tests/, utils/, conftest.py and pyproject.toml")
    parser.add_argument("--out", type=Path, default=RESULTS / "transformers_tests.json", metavar="FILE")
    options = parser.parse_args()
    rows = run(options.checkout.resolve())
    keep(options.out, rows, MODES)
    for mode, row in rows.items():
        only = f"; only here: {row['only under this mode']}" if row["only under this mode"] else ""
        print(f"transformers {row['transformers']}'s own tests, {mode} ({row['calls']} calls): {words(row)}{only}")
    return int(any(row["only under this mode"] or (mode != "stock" and not row["calls"]) for mode, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
