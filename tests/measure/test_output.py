"""What bench and drift share: provenance, tables, files."""

import errno
import json
import re
import resource
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
    for file in (old, tmp_path / "new.json", tmp_path / ("a" * 250), "/dev/null", None):
        output.check_writable(file)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"
    for file in (tmp_path, tmp_path / "missing" / "a.json", old / "a.json", tmp_path / ("a" * 256)):
        with pytest.raises(OSError, match=f"{file} cannot be written"):
            output.check_writable(file)


@pytest.mark.parametrize("check", [True, False])
def test_a_full_disk_leaves_the_old_result_and_is_noticed_before_the_measurement(check, tmp_path):
    (old := tmp_path / "old.json").write_text("kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))  # of each file
        with pytest.raises(OSError, match=f"{old} cannot be written" if check else None):
            output.check_writable(old) if check else output.write_text(old, "x" * 2**16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"


@pytest.mark.parametrize("mounted", [True, False])
def test_results_are_written(mounted, tmp_path, monkeypatch):
    new, link = tmp_path / ("a" * 250), tmp_path / "link"
    link.symlink_to(new)
    if mounted:  # as docker run -v result.json:/result.json does it
        monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
    output.write_text(link, "a byte: \udcff")
    assert new.read_text() == "a byte: \\udcff" and link.is_symlink() and {*tmp_path.iterdir()} == {new, link}
    output.write_json("/dev/null", {})
    assert not Path("/dev/null").is_file()
    output.write_json(new, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(new.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}


def test_what_is_printed():
    assert output.printable("a\nb\x1b[31m\u202e \udcff é 写") == "a\\nb\\x1b[31m\\u202e \\udcff é 写"
