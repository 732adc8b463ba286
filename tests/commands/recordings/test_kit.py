"""The recording in this repository is whole, small, and of one set of weights."""

from pathlib import Path

import pytest
from PIL import Image

from timm_naflex_fast.commands.recordings.format import read_recording, sha256

KIT = Path(__file__).parents[3] / "recordings" / "siglip2_naflex_tiny"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def kit():
    return read_recording(KIT)


def test_it_is_small():
    assert sum(file.stat().st_size for file in KIT.rglob("*") if file.is_file()) <= MOST_BYTES


def test_its_weights_are_those_that_were_recorded(kit):
    assert sha256(KIT / "weights" / "big_vision.npz") == kit.about["weights"]["sha256"]


def test_its_pictures_are_those_that_were_recorded_and_each_is_resized(kit):
    patch = kit.about["patch_size"]
    for picture in kit.about["pictures"]:
        assert sha256(KIT / picture["file"]) == picture["sha256"]
        with Image.open(KIT / picture["file"]) as opened:
            assert [opened.height, opened.width] == picture["size"]
            assert opened.mode == "RGB"
        for pixels, cells in zip(picture["size"], picture["grid"]):
            assert pixels != patch * cells


# Wider than the table, square, tall, wide, as high as the table, one row, one column, higher than the
# table, both numbers odd.
GRIDS = {(2, 22), (8, 8), (10, 6), (5, 10), (12, 4), (1, 64), (64, 1), (21, 3), (7, 9)}


def test_its_grids_are_of_every_kind(kit):
    assert (kit.about["max_patches"], kit.about["table_size"]) == (64, [12, 12])
    assert {tuple(picture["grid"]) for picture in kit.about["pictures"]} == GRIDS
