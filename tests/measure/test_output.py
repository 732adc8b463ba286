"""What bench and drift share: provenance, tables, files."""

import json
import re
from pathlib import Path

import pytest
import torch

from timm_naflex_fast.measure import output


def test_provenance():
    about = output.provenance("naflex-fast bench")
    assert list(about) == ["command", "commit", "date", "machine", "python", "torch", "timm"]
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|release .*", about["commit"])
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]


def test_files_that_cannot_be_written(tmp_path):
    (old := tmp_path / "old.json").write_text("kept")
    for file in (old, tmp_path / "new.json", tmp_path / ("a" * 250), "/dev/null", None):
        output.check_writable(file)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"
    for file in (tmp_path, tmp_path / "missing" / "a.json", old / "a.json", tmp_path / ("a" * 256)):
        with pytest.raises(OSError, match=f"'{file}'"):
            output.check_writable(file)


def test_results_are_written(tmp_path):
    new, link = tmp_path / ("a" * 250), tmp_path / "link"
    link.symlink_to(new)
    output.write_text(link, "a byte: \udcff")
    assert new.read_text() == "a byte: \\udcff" and link.is_symlink() and {*tmp_path.iterdir()} == {new, link}
    output.write_json("/dev/null", {})
    assert not Path("/dev/null").is_file()
    output.write_json(new, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(new.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}


def test_what_is_printed():
    assert output.printable("a\nb\x1b[31m\u202e \udcff é 写") == "a\\nb\\x1b[31m\\u202e \\udcff é 写"
