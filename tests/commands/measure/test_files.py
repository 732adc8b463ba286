"""What bench and drift read and write: folders as people have them, provenance, files, tables."""

import json
import os
from unittest.mock import Mock

import pytest
from PIL import Image

from timm_naflex_fast.commands.measure import output
from timm_naflex_fast.commands.measure.images import image_sources, read
from timm_naflex_fast.text_table import table


def test_what_cannot_be_read_is_skipped_and_named_in_one_line(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "good.png")
    with open(os.fsencode(tmp_path) + b"/a\n\x1b[2J\xff.png", "wb") as file:
        file.write(b"no image")
    damaged = ("bad.tif", Mock(side_effect=TypeError))  # as some TIFFs do
    skipped = []
    ((name, picture),) = read([damaged, *image_sources(tmp_path)], skipped)
    assert (name, picture.size) == ("good.png", (40, 30))
    names = [line.split(":")[0] for line in skipped]
    assert names == ["bad.tif", "a\\n\\x1b[2J\\udcff.png"]
    with pytest.raises(ValueError, match=r"none of the images can be read: bad\.tif: TypeError"):
        list(read([damaged], []))


@pytest.mark.parametrize(
    ("encoding", "is_terminal", "shown"),
    [
        ("utf-8", False, "✓ yes ✗ no"),
        ("ascii", True, "+ yes x no"),
        ("utf-8", True, "\x1b[32m✓\x1b[0m yes \x1b[31m✗\x1b[0m no"),
    ],
)
def test_marks_are_in_colour_on_a_terminal_and_plain_where_the_encoding_lacks_them(
    encoding, is_terminal, shown, monkeypatch
):
    console = Mock(encoding=encoding, isatty=lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", console)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.marked("✓ yes ✗ no") == shown


def test_a_pipe_is_written_to_and_a_link_stays_one(tmp_path):
    read, write = os.pipe()
    with output.written_whole(f"/dev/fd/{write}") as file:
        file.write_text("figures")
    assert os.read(read, 99) == b"figures"
    for end in (read, write):
        os.close(end)
    (tmp_path / "link").symlink_to("place")
    with output.written_whole(tmp_path / "link") as file:
        file.write_text("figures")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "place").read_text() == "figures"


def test_what_is_no_number_is_null_in_json():
    text = output.to_json({"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, None, 1.5]}


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
