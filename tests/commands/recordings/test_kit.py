"""The recording in this repository is whole, and of one set of weights."""

from pathlib import Path

from PIL import Image

from timm_naflex_fast.commands.recordings.format import read_recording, sha256

KIT = Path(__file__).parents[3] / "recordings" / "siglip2_naflex_tiny"


def test_its_weights_and_pictures_are_those_that_were_recorded():
    about = read_recording(KIT).about
    assert sha256(KIT / "weights" / "big_vision.npz") == about["weights"]["sha256"]
    for picture in about["pictures"]:
        assert sha256(KIT / picture["file"]) == picture["sha256"]
        with Image.open(KIT / picture["file"]) as opened:
            assert [opened.height, opened.width] == picture["size"]
            assert opened.mode == "RGB"
