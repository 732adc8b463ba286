"""Pictures of every kind: read in 8 bits, upright, and as the model's own patches."""

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from timm_naflex_fast.pictures import convert

RAMP = np.arange(24 * 40).reshape(24, 40) % 256  # all gray values, wider than high
NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_to_the_same_picture_in_8(suffix, tmp_path):
    Image.fromarray((RAMP * 257).astype(np.uint16)).save(tmp_path / f"a.{suffix}")
    converted = convert(Image.open(tmp_path / f"a.{suffix}"), "RGB")
    assert np.array_equal(converted, Image.fromarray(RAMP.astype(np.uint8)).convert("RGB"))


@pytest.mark.parametrize(
    "values", [np.float32([[0, 0.5]]), np.int32([[0, 65536]]), np.int32([[-1, 5]])]
)
def test_numbers_of_another_kind_make_a_picture_unreadable(values, tmp_path):
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="its numbers are neither 8 nor 16 bits"):
        convert(Image.open(tmp_path / "a.tif"), "RGB")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_a_photo_is_turned_upright(suffix, tmp_path):
    for orientation in range(1, 9):
        file = tmp_path / f"{orientation}.{suffix}"
        data = Image.Exif()
        data[ExifTags.Base.Orientation] = orientation
        Image.fromarray(NOISE).save(file, exif=data)
        wanted = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        assert np.array_equal(convert(Image.open(file), "RGB"), wanted)
        assert (wanted.width < wanted.height) == (orientation >= 5)


@pytest.mark.parametrize("data", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_exif_data_turn_nothing(data, tmp_path):
    Image.fromarray(RAMP.astype(np.uint8)).save(tmp_path / "a.jpg", exif=data)
    assert convert(Image.open(tmp_path / "a.jpg"), "L").size == (40, 24)
