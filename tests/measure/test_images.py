"""Pictures of every kind: read in 8 bits and upright, sizes told from their headers."""

from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.oracles import small_vit
from timm_naflex_fast.measure.images import (
    EXIF_ORIENTATION,
    SCALED,
    TURNED,
    NaFlexImages,
    convert,
    image_sources,
    size,
)

RAMP = np.arange(24 * 40).reshape(24, 40) % 256  # all gray values, wider than high

NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


def exif(orientation):
    data = Image.Exif()
    data[EXIF_ORIENTATION] = orientation
    return data


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_what_has_8_bits_is_pillows_own_conversion(mode):
    image = Image.fromarray(NOISE).convert(mode)
    converted, done = convert(image, "RGB")
    assert done == []
    assert np.array_equal(converted, image.convert("RGB"))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_to_the_same_picture_in_8(suffix, tmp_path):
    Image.fromarray((RAMP * 257).astype(np.uint16)).save(tmp_path / f"a.{suffix}")
    converted, done = convert(Image.open(tmp_path / f"a.{suffix}"), "RGB")
    assert done == [SCALED]
    assert np.array_equal(converted, Image.fromarray(RAMP.astype(np.uint8)).convert("RGB"))


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        ("int32", [0, 257, 514], [0, 1, 2]),  # a dark picture stays dark
        ("int32", [0, 1000, 100_000], [0, 3, 255]),  # beyond 16 bits: the picture's own range
        ("int32", [0, 5, 255], [0, 5, 255]),  # 8 bits in a wider array
        ("int32", [-100, 0, 100], [0, 128, 255]),
        ("float32", [0.2, 0.4, 0.2], [51, 102, 51]),
        ("float32", [9, 9, 9], [0, 0, 0]),
        ("float32", [-3e38, 0, 3e38], [0, 128, 255]),
    ],
)
def test_numbers_of_32_bits_are_scaled(kind, values, wanted):
    converted, done = convert(Image.fromarray(np.array([values], kind)), "L")
    assert done == [SCALED]
    assert np.asarray(converted).tolist() == [wanted]


def test_numbers_that_are_none_make_a_picture_unreadable(tmp_path):
    Image.fromarray(np.float32([[0, np.nan]])).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a\.tif: it holds infinity or NaN"):
        list(NaFlexImages(image_sources(tmp_path, []), small_vit()))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_a_photo_is_turned_upright(suffix, orientation, tmp_path):
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(NOISE).save(file, exif=exif(orientation))
    wanted = ImageOps.exif_transpose(Image.open(file)).convert("RGB")

    converted, done = convert(Image.open(file), "RGB")
    assert np.array_equal(converted, wanted)
    is_tiff = suffix == "tif"  # Pillow turns it for everybody, but not in each release
    if not is_tiff:
        assert done == ([] if orientation == 1 else [TURNED])

    image = Image.open(file)
    with mock.patch.object(image, "load", wraps=image.load) as decode:
        assert size(image) == (wanted.height, wanted.width)
    assert is_tiff or not decode.called


@pytest.mark.parametrize("data", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_exif_data_turn_nothing(data, tmp_path):
    Image.fromarray(RAMP.astype(np.uint8)).save(tmp_path / "a.jpg", exif=data)
    converted, done = convert(Image.open(tmp_path / "a.jpg"), "L")
    assert done == [] and converted.size == (40, 24)
    assert size(Image.open(tmp_path / "a.jpg")) == (24, 40)


def test_what_was_changed_is_counted(photos):
    turned = Image.open(photos / "a.jpg")
    turned.save(photos / "turned.jpg", exif=exif(8))
    Image.fromarray((RAMP * 257).astype(np.uint16)).save(photos / "turned_too.png", exif=exif(6))
    batches = NaFlexImages(image_sources(photos, []), small_vit(in_chans=3), 16, batch_size=2)
    assert batches.facts == {}
    list(batches)
    list(batches)  # read again for the pictures of a report
    (words,) = batches.facts.values()
    assert words == (
        "2 turned upright, as their EXIF data say; 1 with 16 or 32 bits per pixel, scaled to 8 bits"
    )
