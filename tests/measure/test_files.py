"""What bench and drift read and write: folders as people have them, provenance, files, tables."""

import errno
import json
import os
import re
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.support.oracles import small_vit
from timm_naflex_fast import __version__
from timm_naflex_fast.measure import output
from timm_naflex_fast.measure.images import NaFlexImages, image_sources, read
from timm_naflex_fast.text_table import table


def test_what_cannot_be_read_is_skipped_and_named_in_one_line(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "good.png")
    os.mkfifo(tmp_path / "pipe.png")  # to open it would wait for its other end
    with open(os.fsencode(tmp_path) + b"/a\n\x1b[2J\xff.png", "wb") as file:
        file.write(b"no image")
    damaged = ("bad.tif", Mock(side_effect=TypeError))  # as some TIFFs do
    skipped = []
    found = list(
        read([damaged, *image_sources(tmp_path, skipped)], lambda image: image.size, skipped)
    )
    assert found == [("good.png", (40, 30))]
    names = [line.split(":")[0] for line in skipped]
    assert names == ["bad.tif", "a\\n\\x1b[2J\\udcff.png"]


def test_images_have_the_models_channels(photos):
    gray = small_vit(patch_size=8, in_chans=1)
    batches = NaFlexImages(image_sources(photos, []), gray, max_seq_len=12, batch_size=3)
    shapes = [inputs["patches"].shape for inputs, _ in batches]
    assert shapes == [(3, 12, 64), (1, 12, 64)] and len(batches) == 2


def test_provenance():
    about = output.provenance("naflex-fast bench")
    assert {"command", "commit", "date", "machine", "python", "timm"} <= about.keys()
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]


def test_the_commit_and_the_last_change_of_the_code_or_the_release(monkeypatch):
    said = {"ls-files": "a.py", "status": "M a.py", "rev-parse": "abc1234", "log": "def5678"}
    monkeypatch.setattr(output, "_git", lambda word, *words: said[word])
    assert output.code_version() == {"commit": "abc1234+", "code_last_changed_in": "def5678"}
    said["status"] = ""
    assert output.code_version()["commit"] == "abc1234"

    release = {"commit": f"release {__version__}"}
    said["ls-files"] = ""  # an installed package in somebody's folder
    assert output.code_version() == release
    monkeypatch.setattr(output, "_git", None)
    monkeypatch.setattr(output.shutil, "which", lambda name: None)
    assert output.code_version() == release


def test_to_ask_whether_a_file_can_be_written_changes_nothing(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("kept")
    for file in (old, tmp_path / "new.json"):
        output.check_writable(file)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"


def test_a_name_that_is_not_utf_8_is_told(tmp_path):
    file = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff.onnx")
    with pytest.raises(ValueError, match=r"m\\udcff.onnx: a file's name must be UTF-8"):
        output.check_writable(file)


def test_a_folder_in_which_nothing_can_be_made_is_told_with_the_files_name(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(output.tempfile, "TemporaryFile", full)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*old\.json'"):
        output.check_writable(tmp_path / "old.json")


@pytest.mark.skipif(os.name != "posix", reason="only there files can be limited")
def test_all_files_of_a_report_are_written_or_none(tmp_path):
    import resource

    old, new = tmp_path / "old.md", tmp_path / "new.html"
    old.write_text("kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=re.escape(str(new))):
            output.write_files({old: "short", new: "long" * 4096})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"
    output.write_files({old: "short", new: "long"})
    assert (old.read_text(), new.read_text()) == ("short", "long")
    assert sorted(tmp_path.iterdir()) == [new, old]


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    output.write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_is_refused_and_not_replaced(kind, tmp_path):
    kind(tmp_path / "there")
    with pytest.raises(OSError, match="there is a folder, a pipe or a device"):
        output.check_writable(tmp_path / "there")


def test_what_is_no_number_is_null_in_json(tmp_path):
    file = tmp_path / "a.json"
    output.write_json(file, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}


def test_text_for_a_terminal_is_one_line():
    given = "a\nb\x1b[31m\u202e \udcff é 写"
    assert output.printable(given) == "a\\nb\\x1b[31m\\u202e \\udcff é 写"


def test_figures_stand_to_the_right_and_words_to_the_left():
    lines = [
        {"who": "stock", "ms": "1", "saved": "1.0 %"},
        {"who": "us", "ms": "234", "saved": "noise", "more": "< 5"},
    ]
    assert table(lines).split("\n") == [
        "who     ms  saved  more",
        "stock    1  1.0 %     -",
        "us     234  noise   < 5",
    ]


def test_a_table_that_is_wider_than_the_terminal_is_a_list(monkeypatch):
    lines = [
        {"who": "stock", "what it is": "the loop of the library", "ms": "1", "": "right"},
        {"who": "us", "ms": "234"},
    ]
    whole = table(lines)
    width = max(map(len, whole.splitlines()))
    monkeypatch.setenv("COLUMNS", str(width))
    assert table(lines) == whole
    monkeypatch.setenv("COLUMNS", "24")
    assert table(lines).split("\n") == [
        "stock",
        "  what it is: the loop",
        "    of the library",
        "  ms: 1",
        "  right",
        "us",
        "  ms: 234",
    ]
    assert table([]) == ""
