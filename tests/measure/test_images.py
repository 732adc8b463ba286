"""Folders as people have them: damaged files, pipes, names with anything in them."""

import os
from unittest.mock import Mock

import pytest
from PIL import Image

from tests.support.oracles import small_vit
from timm_naflex_fast.measure.bench.workloads import read_sizes
from timm_naflex_fast.measure.images import NaFlexImages, image_sources, read


def test_what_cannot_be_read_is_named_and_skipped(tmp_path):
    for message in ("is not a folder", r"holds no image; looked for \.jpg"):
        with pytest.raises(ValueError, match=message):
            image_sources(tmp_path / "images")
        (tmp_path / "images").mkdir(exist_ok=True)
    Image.new("RGB", (40, 30)).save(tmp_path / "images" / "good.png")
    (tmp_path / "images" / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "images" / "pipe.png")  # to open it would wait for its other end
    sources = [("bad.tif", Mock(side_effect=TypeError)), *image_sources(tmp_path / "images")]  # as some TIFFs do
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
    assert [inputs["patches"].shape for inputs, _ in batches] == [(3, 12, 64), (1, 12, 64)] and len(batches) == 2
    with pytest.raises(ValueError, match="the model takes 2 channels per image; images are read with 1 or 3"):
        NaFlexImages(image_sources(photos), small_vit(in_chans=2))
