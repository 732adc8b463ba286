"""The recording in this repository is whole, and of one set of weights."""

import hashlib

from on_the_kit import KIT, recording
from PIL import Image


def test_its_weights_and_pictures_are_those_that_were_recorded():
    about = recording().about
    weights = (KIT / "weights" / "big_vision.npz").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == about["weights"]["sha256"]
    for picture in about["pictures"]:
        with Image.open(KIT / picture["file"]) as opened:
            assert [opened.height, opened.width] == picture["size"]
            assert opened.mode == "RGB"
