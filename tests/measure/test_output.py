"""What bench and drift share: provenance, tables, files."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

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
    for file in (old, tmp_path / "new.json"):
        output.check_writable(file)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"
    old.chmod(0o444)
    for file in (tmp_path, old, tmp_path / "missing" / "a.json"):
        with pytest.raises(OSError, match=f"{file} cannot be written"):
            output.check_writable(file)


def test_results_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    old, new = tmp_path / "old.md", tmp_path / "new.md"
    old.write_text("the old report")
    for step in ("replace", "write_text"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(Path, step, Mock(side_effect=OSError("no space left")))
            output.write_files({old: "x", new: "y"})
        assert [path.name for path in tmp_path.iterdir()] == ["old.md"] and old.read_text() == "the old report"
    old.chmod(0o600)
    output.write_files({old: "a byte: \udcff", new: "y"})
    assert old.stat().st_mode & 0o777 == 0o600
    assert old.read_text() == "a byte: \\udcff" and sorted(p.name for p in tmp_path.iterdir()) == ["new.md", "old.md"]
    output.write_json("/dev/null", {})
    assert not Path("/dev/null").is_file()
    output.write_json(new, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(new.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}


def test_what_is_printed(capsys):
    assert output.printable("a\nb\x1b[31m\u202e \udcff é 写") == "a\\nb\\x1b[31m\\u202e \\udcff é 写"
    output.print_table([{"who": "stock", "ms": "1"}, {"who": "us", "ms": "234", "more": "x"}])
    assert capsys.readouterr().out == "who     ms  more\nstock    1     -\nus     234     x\n"
