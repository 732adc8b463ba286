"""``nox -s timm_tests``: another suite runs patched, and says what ran."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import timm_suite

ROOT = Path(__file__).parents[1]
SUITE = """
import timm_naflex_fast
from tests.support.oracles import embed, small_vit

def test_mode():
    assert timm_naflex_fast.status().flags.pos_embed == "grid_sample"
    embed(small_vit())

def test_another():
    with timm_naflex_fast.enable("interpolate-cached"):
        embed(small_vit())
    embed(small_vit())
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_suite_runs_patched_and_what_ran_is_written_down(workers, tmp_path):
    shutil.copy(timm_suite.__file__, tmp_path)
    (tmp_path / "test_somebody_elses.py").write_text(SUITE)
    how = (
        f"-p timm_suite --naflex-mode grid-sample -n {workers} --dist loadfile -p no:cacheprovider"
    )
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, *how.split(), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    # What ran by another choice is not counted.
    assert (tmp_path / "calls").read_text() == "grid_sample 2\n"
