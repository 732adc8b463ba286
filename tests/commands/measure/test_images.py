"""Pictures of every kind: read in 8 bits, upright, and as the model's own patches."""

import numpy as np
import pytest
import timm
import torch
from PIL import ExifTags, Image, ImageOps

from tests.support.oracles import small_vit
from tests.support.tiny_siglip2 import FAMILY
from timm_naflex_fast.commands.measure.images import eval_transform, image_sources, naflex_batches
from timm_naflex_fast.pictures import convert

RAMP = np.arange(24 * 40).reshape(24, 40) % 256  # all gray values, wider than high
NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_what_has_8_bits_is_pillows_own_conversion(mode):
    image = Image.fromarray(NOISE).convert(mode)
    assert np.array_equal(convert(image, "RGB"), image.convert("RGB"))


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
    with pytest.raises(ValueError, match=r"a\.tif: its numbers are neither 8 nor 16 bits"):
        photo_batch(small_vit(in_chans=3), tmp_path)


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


def test_what_cannot_be_read_is_among_what_was_skipped(photos):
    (photos / "dead.png").symlink_to("nowhere")
    (photos / "text.png").write_text("no image")
    (photos / "notes.txt").touch()  # is no image
    transform = eval_transform(small_vit(in_chans=3), 16)
    skipped = []
    batches = naflex_batches(image_sources(photos), transform, 16, 3, skipped)
    assert [len(batch["patches"]) for batch, _ in batches] == [3, 1]
    assert [line.split(":")[0] for line in skipped] == ["dead.png", "text.png"]


def photo_batch(model, folder):
    transform = eval_transform(model, 16)
    ((batch, _),) = naflex_batches(image_sources(folder), transform, 16, 9, [])
    return batch


needs_order = pytest.mark.skipif(
    not hasattr(small_vit().embeds, "channels_last"), reason="this timm knows one order of a patch"
)


@needs_order
def test_a_model_with_channels_first_gets_its_own_patches(photos):
    last = small_vit(in_chans=3).eval()
    first = small_vit(in_chans=3, patchify_channels_last=False).eval()
    state = last.state_dict()
    weight = state["embeds.proj.weight"]
    height, width = last.embeds.patch_size
    state["embeds.proj.weight"] = weight.unflatten(1, (height, width, 3)).movedim(3, 1).flatten(1)
    first.load_state_dict(state)
    with torch.no_grad():
        expected = last(photo_batch(last, photos))
        torch.testing.assert_close(first(photo_batch(first, photos)), expected)


OVERLAY = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
# Each setting of a model, with what timm's own transform is given for it, and the pictures' mode.
SETTINGS = {
    "patch size": (dict(patch_size=(4, 2)), dict(patch_size=(4, 2)), "RGB"),
    "mean and deviation": (dict(pretrained_cfg_overlay=OVERLAY), OVERLAY, "RGB"),
    "gray": (
        dict(pretrained_cfg_overlay=OVERLAY, in_chans=1),
        dict(mean=(0.1,), std=(0.4,)),
        "L",
    ),
    "filter": (
        dict(pretrained_cfg_overlay=dict(interpolation="nearest")),
        dict(interpolation="nearest"),
        "RGB",
    ),
    "crop, which NaFlex has not": (dict(pretrained_cfg_overlay=dict(crop_pct=0.5)), {}, "RGB"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_the_model_that_makes_patches_is_followed(name, photos):
    options, own, mode = SETTINGS[name]
    sizes = dict(depth=1, embed_dim=24, num_heads=2, num_classes=0)
    model = timm.create_model(FAMILY, **sizes, **options)
    batch = photo_batch(model, photos)
    settings = dict(patch_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    transform = timm.data.create_transform(
        224, naflex=True, patchify=True, max_seq_len=16, **settings | own
    )
    for number, (_, load) in enumerate(image_sources(photos)):
        expected = transform(load().convert(mode))["patches"]
        valid = batch["patch_valid"][number]
        assert torch.equal(batch["patches"][number][valid], expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(in_chans=4), "the model takes 4 channels; pictures have 1 or 3"),
        (dict(embed_proj_type="conv"), "is a convolution, which takes no patches; valid: embed_pr"),
    ],
)
def test_a_model_that_pictures_cannot_be_given_to_is_told(options, says, photos):
    with pytest.raises(ValueError, match=says):
        photo_batch(small_vit(**options), photos)
