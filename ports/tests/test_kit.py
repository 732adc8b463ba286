"""The recording in this repository is whole, and of one set of weights."""

import hashlib
from pathlib import Path

from PIL import Image
from vit_ports.format import read_recording

KIT = Path(__file__).parents[1] / "kit"


def test_its_weights_and_pictures_are_those_that_were_recorded():
    about = read_recording(KIT).about
    weights = (KIT / "weights" / "big_vision.npz").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == about["weights"]["sha256"]
    for picture in about["pictures"]:
        with Image.open(KIT / picture["file"]) as opened:
            assert [opened.height, opened.width] == picture["size"]
            assert opened.mode == "RGB"
