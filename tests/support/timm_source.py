"""The tests of the installed timm, from its source package, in a folder.

uv run --with pip --with setuptools python tests/support/timm_source.py FOLDER
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path


def fetch(folder: Path) -> None:
    """Put timm's tests, and the file that configures pytest for them, into ``folder``."""
    release = importlib.metadata.version("timm")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    from_source = ["--no-deps", "--no-binary", ":all:", f"timm=={release}"]
    subprocess.run([*download, *from_source], check=True)
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    # Beside the source package's own timm folder the installed timm would be hidden, so the tests
    # move away from it.
    source = folder / f"timm-{release}"
    shutil.rmtree(folder / "tests", ignore_errors=True)
    shutil.move(source / "tests", folder / "tests")
    shutil.copy(source / "pyproject.toml", folder)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
