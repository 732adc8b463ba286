"""A checker of types knows the public names, and no others. (cli/test_main.py lists them.)"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# As strict as a user's project may be. The package's own code is not checked here, and what it
# imports is not read, because that takes long.
STRICT = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,timm.*,numpy.*,PIL.*,einx.*]
follow_imports = skip
"""
RIGHT = """
from timm_naflex_fast import Handle, Status, disable, enable, functional, status

handle: Handle = enable("interpolate-cached", rope="stock", strict=True)
now: Status = status()
calls: int = now.calls["pos_embed", "matmul"]
handle.restore()
with timm_naflex_fast.enable(mode="matmul", library=("timm", "transformers")) as entered:
    print(entered.flags.pos_embed.upper(), functional.resample_pos_embed, calls)
disable()
"""
WRONG = {
    "import timm_naflex_fast; from timm_naflex_fast import nonsense": 'has no attribute "nonsense"',
    'timm_naflex_fast.enabel("matmul")': 'has no attribute "enabel"; maybe "enable"',
    'timm_naflex_fast.enable("matmull")': 'incompatible type "Literal',
    "timm_naflex_fast.enable(strikt=True)": 'did you mean "strict"',
    'timm_naflex_fast.enable(pos_embed="batched")': 'incompatible type "Literal',
    "print(timm_naflex_fast.status().cals)": '"Status" has no attribute "cals"',
    "timm_naflex_fast.functional.resample()": 'has no attribute "resample"',
}


def test_mypy_strict_finds_each_wrong_name_of_a_script_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(STRICT)
    (tmp_path / "script.py").write_text("\n".join([*WRONG, RIGHT]))
    # Names of the user's project are looked for in its folder, then in the environment.
    command = [sys.executable, "-m", "mypy", "--no-color-output", "script.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    found = re.findall(r"^script.py:(\d+): error: (.*)$", done.stdout, re.M)
    assert [int(line) for line, _ in found] == list(range(1, len(WRONG) + 1))
    for (_, said), error in zip(found, WRONG.values()):
        assert error in said
