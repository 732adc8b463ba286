"""What bench and drift read and write: folders as people have them, provenance, files, tables."""

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.support.oracles import small_vit
from timm_naflex_fast import __version__
from timm_naflex_fast.measure import output
from timm_naflex_fast.measure.bench.workloads import read_sizes
from timm_naflex_fast.measure.images import NaFlexImages, image_sources, read
from timm_naflex_fast.text_table import table


def test_a_folder_without_images_is_told(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        image_sources(tmp_path / "images")
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"holds no image; looked for \.jpg"):
        image_sources(tmp_path / "images")


def test_what_cannot_be_read_is_named_and_skipped(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "good.png")
    (tmp_path / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "pipe.png")  # to open it would wait for its other end
    damaged = ("bad.tif", Mock(side_effect=TypeError))  # as some TIFFs do
    skipped = []
    found = list(read([damaged, *image_sources(tmp_path)], lambda image: image.size, skipped))
    assert found == [("good.png", (40, 30))]
    assert [line.split(":")[0] for line in skipped] == ["bad.tif", "text.png"]
    assert read_sizes(tmp_path)[1] == skipped[1:]


@pytest.mark.parametrize("name", [b"a\nb.png", b"a\x1b[2J.png", b"a\xff.png"])
def test_names_become_one_line_of_text(name, tmp_path):
    with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
        file.write(b"no image")
    sources = image_sources(tmp_path)
    skipped = []
    with pytest.raises(ValueError, match="none of the images can be read"):
        list(read(sources, lambda image: image.size, skipped))
    for text in (sources[0][0], skipped[0]):
        assert text.isprintable() and text.encode()


def test_images_have_the_models_channels(photos):
    gray = small_vit(patch_size=8, in_chans=1)
    batches = NaFlexImages(image_sources(photos), gray, max_seq_len=12, batch_size=3)
    shapes = [inputs["patches"].shape for inputs, _ in batches]
    assert shapes == [(3, 12, 64), (1, 12, 64)] and len(batches) == 2


def test_a_model_of_other_channels_is_refused(photos):
    says = "the model takes 2 channels per image; images are read with 1 or 3"
    with pytest.raises(ValueError, match=says):
        NaFlexImages(image_sources(photos), small_vit(in_chans=2))


def test_provenance():
    about = output.provenance("naflex-fast bench")
    keys = "command commit code_last_changed_in date machine python torch timm"
    assert list(about) == keys.split()
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|release .*", about["commit"])
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_installed_package_has_a_release_and_no_commit(is_there, monkeypatch):
    # No git at all, or one that does not know the files, as of a package in somebody's folder.
    monkeypatch.setattr(output.shutil, "which", lambda name: name if is_there else None)
    monkeypatch.setattr(output, "_git", lambda *words: "")
    assert output.commit() == f"release {__version__}"
    assert output.last_change() == ""


def test_a_commit_with_edits_and_the_last_change_of_the_code(monkeypatch):
    said = {"ls-files": "a.py", "status": "M a.py", "rev-parse": "abc1234", "log": "def5678"}
    monkeypatch.setattr(output.shutil, "which", lambda name: name)
    monkeypatch.setattr(output, "_git", lambda word, *words: said[word])
    assert output.commit() == "abc1234+"
    assert output.last_change() == "def5678"
    said["status"] = ""
    assert output.commit() == "abc1234"


def test_to_ask_whether_a_file_can_be_written_changes_nothing(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("kept")
    for file in (old, tmp_path / "new.json", tmp_path / ("a" * 250), "/dev/null", None):
        output.check_writable(file)
    assert [*tmp_path.iterdir()] == [old] and old.read_text() == "kept"


@pytest.mark.parametrize("name", [".", "missing/a.json", "old.json/a.json", "a" * 256])
def test_files_that_cannot_be_written_are_named(name, tmp_path):
    (tmp_path / "old.json").touch()
    file = tmp_path / name
    with pytest.raises(OSError, match=f"'{file}'"):
        output.check_writable(file)


def test_text_is_written_through_a_link(tmp_path):
    file = tmp_path / ("a" * 250)
    link = tmp_path / "link"
    link.symlink_to(file)
    output.write_text(link, "a byte: \udcff")
    assert file.read_text() == "a byte: \\udcff"
    assert link.is_symlink() and {*tmp_path.iterdir()} == {file, link}


def test_what_is_no_number_is_null_in_json(tmp_path):
    file = tmp_path / "a.json"
    output.write_json(file, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}
    output.write_json("/dev/null", {})
    assert not Path("/dev/null").is_file()


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
