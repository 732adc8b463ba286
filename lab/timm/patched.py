"""timm with the patches of this folder applied, beside the installed timm, which stays as it is.

The patches are for timm 1.0.31. Each applies alone, and both do, in either order.

Tests: tests/lab/test_timm_patches.py.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import timm

HERE = Path(__file__).resolve().parent
RELEASE = "1.0.31"
NEEDS_RELEASE = f"the patches are for timm {RELEASE}; here is {timm.__version__}"


def copy_patched(folder: Path, *patches: str) -> None:
    """Copy the installed timm to ``folder``/timm and apply patches of this folder, named without
    ".patch". Their tests come to ``folder``/tests.

    Raises:
        subprocess.CalledProcessError: a patch does not apply; git has said why.
    """
    installed = Path(timm.__file__).parent
    shutil.copytree(installed, folder / "timm", ignore=shutil.ignore_patterns("__pycache__"))
    # In a folder of a repository git would skip what this repository does not hold.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    for patch in patches:
        command = ["git", "apply", str(HERE / f"{patch}.patch")]
        subprocess.run(command, cwd=folder, env=alone, check=True)


@functools.cache
def load_embeds(*patches: str) -> Any:
    """The class NaFlexEmbeds of timm with these patches, in this process.

    Raises:
        RuntimeError: the installed timm is another release than the patches are for.
    """
    if timm.__version__ != RELEASE:
        raise RuntimeError(NEEDS_RELEASE)
    name = "timm.models.naflexvit_" + "_".join(patches)
    with tempfile.TemporaryDirectory() as folder:
        copy_patched(Path(folder), *patches)
        source = Path(folder, "timm", "models", "naflexvit.py")
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look there
        # Its models stay out of timm's registry, where the installed ones are.
        with mock.patch("timm.models._registry.register_model", lambda function: function):
            spec.loader.exec_module(module)
    return module.NaFlexEmbeds
