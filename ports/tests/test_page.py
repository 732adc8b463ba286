"""The page's session does and prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from on_the_kit import KIT

PORTS = KIT.parent
PAGE = (PORTS / "README.md").read_text(encoding="utf-8")
NUMBER = r"\d[\d.e+-]*"  # the last digits are another processor's


def test_it_can_be_read_in_eight_minutes():
    assert len(PAGE.split()) <= 1800


def test_the_session_prints_what_the_page_says(tmp_path):
    (tmp_path / "ports").symlink_to(PORTS)
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(programs)}
    session = PAGE.split("## A session")[1].split("\n## ")[0]
    statuses = []
    shown = re.findall(r"```sh\n(.*?)```.*?```text\n(.*?)```", session, re.DOTALL)
    for commands, said in shown:
        run = subprocess.run(
            commands, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert run.stderr == ""
        assert re.sub(NUMBER, "#", said) in re.sub(NUMBER, "#", run.stdout)
        statuses.append(run.returncode)
    assert statuses == [1, 0]
