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
from timm_naflex_fast.measure import output
from timm_naflex_fast.measure.bench.workloads import read_sizes
from timm_naflex_fast.measure.images import NaFlexImages, image_sources, read
from timm_naflex_fast.text_table import table


def test_what_cannot_be_read_is_named_and_skipped(tmp_path):
    for message in ("is not a folder", r"holds no image; looked for \.jpg"):
        with pytest.raises(ValueError, match=message):
            image_sources(tmp_path / "images")
        (tmp_path / "images").mkdir(exist_ok=True)
    Image.new("RGB", (40, 30)).save(tmp_path / "images" / "good.png")
    (tmp_path / "images" / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "images" / "pipe.png")  # to open it would wait for its other end
    sources = [
        ("bad.tif", Mock(side_effect=TypeError)),
        *image_sources(tmp_path / "images"),
    ]  # as some TIFFs do
    assert list(read(sources, lambda image: image.size, skipped := [])) == [("good.png", (40, 30))]
    assert [line.split(":")[0] for line in skipped] == ["bad.tif", "text.png"]
    assert read_sizes(tmp_path / "images")[1] == skipped[1:]


@pytest.mark.parametrize("name", [b"a\nb.png", b"a\x1b[2J.png", b"a\xff.png"])
def test_names_become_one_line_of_text(name, tmp_path):
    with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
        file.write(b"no image")
    ((shown, _),) = image_sources(tmp_path)
    with pytest.raises(ValueError, match="none of the images can be read"):
        list(read(image_sources(tmp_path), lambda image: image.size, skipped := []))
    for text in (shown, *skipped):
        assert text.isprintable() and text.encode()


def test_images_have_the_models_channels(photos):
    gray = small_vit(patch_size=8, in_chans=1)
    batches = NaFlexImages(image_sources(photos), gray, max_seq_len=12, batch_size=3)
    assert [inputs["patches"].shape for inputs, _ in batches] == [(3, 12, 64), (1, 12, 64)] and len(
        batches
    ) == 2
    with pytest.raises(
        ValueError, match="the model takes 2 channels per image; images are read with 1 or 3"
    ):
        NaFlexImages(image_sources(photos), small_vit(in_chans=2))


def test_provenance():
    about = output.provenance("naflex-fast bench")
    assert list(about) == [
        "command",
        "commit",
        "code_last_changed_in",
        "date",
        "machine",
        "python",
        "torch",
        "timm",
    ]
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
    assert (
        new.read_text() == "a byte: \\udcff"
        and link.is_symlink()
        and {*tmp_path.iterdir()} == {new, link}
    )
    output.write_json("/dev/null", {})
    assert not Path("/dev/null").is_file()
    output.write_json(new, {"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(new.read_text(), parse_constant=pytest.fail) == {"a": [None, None, 1.5]}
    assert (
        output.printable("a\nb\x1b[31m\u202e \udcff é 写") == "a\\nb\\x1b[31m\\u202e \\udcff é 写"
    )


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
