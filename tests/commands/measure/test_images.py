"""Pictures of every kind: read in 8 bits and upright, sizes told from their headers."""

import errno
import os
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageOps

from tests.support.oracles import small_vit
from tests.support.tiny_siglip2 import FAMILY
from timm_naflex_fast.commands.measure.images import (
    NaFlexImages,
    image_files,
    image_sources,
    read,
    size,
)
from timm_naflex_fast.pictures import EXIF_ORIENTATION, FRAMES, SCALED, TURNED, convert


def on_grid(values, grid):
    """Values (1, N, ...) of the tokens of one image, row by row, then padding: (h, w, ...)."""
    return values[0, : grid[0] * grid[1]].unflatten(0, grid).float()


def pixels_of(patches, embeds):
    """The image made of its patches again: (height, width, 3), contrast stretched to 0...1."""
    if getattr(embeds, "channels_last", True):
        parts = patches.unflatten(2, (*embeds.patch_size, embeds.in_chans))
    else:
        parts = patches.unflatten(2, (embeds.in_chans, *embeds.patch_size)).movedim(2, -1)
    pixels = parts.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    pixels = pixels - pixels.min()
    return (pixels / pixels.max().clamp(min=1e-6)).expand(-1, -1, 3)


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


def animated(file, mode="RGB"):
    frames = [Image.fromarray(NOISE).convert(mode) for _ in range(3)]
    frames[0].save(file, save_all=True, append_images=[frame.rotate(90) for frame in frames[1:]])


@pytest.mark.parametrize("suffix", ["gif", "tif", "webp", "png"])
def test_further_frames_are_told_and_the_first_is_taken(suffix, tmp_path):
    animated(tmp_path / f"a.{suffix}")
    wanted = Image.open(tmp_path / f"a.{suffix}").convert("RGB")
    converted, done = convert(Image.open(tmp_path / f"a.{suffix}"), "RGB")
    assert done == [FRAMES]
    assert np.array_equal(converted, wanted)


def test_links_that_are_not_followed_are_named(photos, tmp_path):
    (photos / "dead.png").symlink_to("nowhere")
    (photos / "linked").symlink_to(tmp_path)
    (photos / "notes.txt").symlink_to("nowhere")  # is no image
    left_out = []
    found = list(read(image_sources(photos, left_out), lambda image: image.size, left_out))
    assert len(found) == 4
    assert [line.split(":")[0] for line in left_out] == [f"{photos}/linked", "dead.png"]


def test_a_named_pipe_is_left_out_and_named(photos):
    os.mkfifo(photos / "pipe.png")
    (photos / "linked.png").symlink_to("pipe.png")
    left_out = []
    assert len(image_files(photos, left_out)) == 4
    message = "not a regular file"
    assert sorted(left_out) == [
        f"{photos}/linked.png: {message}",
        f"{photos}/pipe.png: {message}",
    ]


def test_a_folder_that_cannot_be_read_is_named(photos, monkeypatch):
    (photos / "sub").mkdir()
    (photos / "sub" / "e.png").touch()
    list_folder = os.scandir

    def refuse(path):
        if os.path.basename(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    closed = ["sub"]
    left_out = []
    assert len(image_files(photos, left_out)) == 4
    assert left_out == [f"[Errno 13] Permission denied: '{photos}/sub'"]
    closed = ["photos"]
    with pytest.raises(ValueError, match=r"photos is not a folder of images .*Permission denied"):
        image_files(photos, [])


def test_what_a_folder_left_out_is_among_what_was_skipped(photos):
    (photos / "dead.png").symlink_to("nowhere")
    (photos / "text.png").write_text("no image")
    left_out = []
    sources = image_sources(photos, left_out)
    batches = NaFlexImages(sources, small_vit(in_chans=3), 16, skipped=left_out)
    for _ in range(2):
        list(batches)
        names = [line.split(":")[0] for line in batches.skipped]
        assert names == ["dead.png", "text.png"]


def photo_batch(model, folder, **options):
    (batch, _), *_ = NaFlexImages(image_sources(folder), model, 16, **options)
    return {key: batch[key] for key in ("patches", "patch_coord", "patch_valid")}


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


@needs_order
def test_the_picture_of_a_report_is_made_of_patches_in_either_order(photos):
    shown = []
    for order in (True, False):
        model = small_vit(in_chans=3, patchify_channels_last=order)
        batch = photo_batch(model, photos)
        grid = (batch["patch_coord"][0].amax(0) + 1).tolist()
        shown.append(pixels_of(on_grid(batch["patches"][:1], grid), model.embeds))
    assert torch.equal(*shown)


# Each with what timm's own transform is given for it.
SETTINGS = {
    "patch size": (dict(patch_size=(4, 2)), dict(patch_size=(4, 2))),
    "mean and deviation": (
        dict(pretrained_cfg_overlay=dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))),
        dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)),
    ),
    "filter": (
        dict(pretrained_cfg_overlay=dict(interpolation="nearest")),
        dict(interpolation="nearest"),
    ),
    "crop, which NaFlex has not": (dict(pretrained_cfg_overlay=dict(crop_pct=0.5)), {}),
    "image size, which NaFlex has not": (
        dict(pretrained_cfg_overlay=dict(input_size=(3, 32, 32))),
        {},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_of_the_model_that_makes_patches_is_followed(name, photos):
    options, own = SETTINGS[name]
    sizes = dict(depth=1, embed_dim=24, num_heads=2, num_classes=0)
    model = timm.create_model(FAMILY, **sizes, **options)
    batch = photo_batch(model, photos)
    settings = dict(patch_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
    transform = timm.data.create_transform(
        224, naflex=True, patchify=True, max_seq_len=16, **settings | own
    )
    for number, (_, load) in enumerate(image_sources(photos, [])):
        expected = transform(load().convert("RGB"))["patches"]
        valid = batch["patch_valid"][number]
        assert torch.equal(batch["patches"][number][valid], expected)


def test_a_gray_model_is_given_the_first_mean_and_deviation(photos):
    overlay = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    sizes = dict(depth=1, embed_dim=24, num_heads=2, num_classes=0, in_chans=1)
    model = timm.create_model(FAMILY, **sizes, pretrained_cfg_overlay=overlay)
    batch = photo_batch(model, photos)
    (_, load), *_ = image_sources(photos, [])
    transform = timm.data.create_transform(
        224,
        naflex=True,
        patchify=True,
        max_seq_len=16,
        mean=(0.1,),
        std=(0.4,),
        interpolation="bicubic",
    )
    expected = transform(load().convert("L"))["patches"]
    assert torch.equal(batch["patches"][0][batch["patch_valid"][0]], expected)


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
