"""From pictures to what an exported model takes; the file itself tells how."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("patches", "patch_coord", "patch_valid")
# The order of the numbers in one patch.
CHANNELS_LAST = "y, x, channel"
CHANNELS_FIRST = "channel, y, x"
COLOURS = {"1": "L", "3": "RGB"}  # Pillow's mode by the number of channels


def patches_of(pictures: Sequence[Any], settings: Mapping[str, str]) -> "dict[str, Tensor]":
    """Make of pictures what a program of ``naflex-fast export`` takes.

    timm's own eval transform and collator do it: a picture is resized to as many whole patches as
    ``max_seq_len`` allows, its aspect ratio nearly kept, then normalised and cut. Before that,
    photos are turned upright as their EXIF data say, and 16 bits are scaled to 8.

    Args:
        pictures: B PIL images of any size and mode.
        settings: the metadata of the exported file, texts by their names. Of them ``patch_size``,
            ``patch_order``, ``channels``, ``mean``, ``std``, ``interpolation`` and ``max_seq_len``
            are read.

    Returns:
        ``patches`` (B, N, P) float32, ``patch_coord`` (B, N, 2) int64 as (y, x), and
        ``patch_valid`` (B, N) bool, False for padding. N is ``max_seq_len``, P the numbers of one
        patch.

    Raises:
        TypeError: ``pictures`` is no sequence of PIL images.
        ValueError: no picture, or one whose numbers are neither 8 nor 16 bits; or settings without
            ``max_seq_len``, as in a file for plain images, or with another number of channels than 1
            and 3.
        KeyError: another setting is missing.

    Source: ``timm.data.create_transform`` and ``timm.data.naflex_dataset.NaFlexCollator``.

    >>> from PIL import Image
    >>> settings = {"patch_size": "[16, 16]", "patch_order": "y, x, channel", "channels": "3",
    ...     "mean": "[0.5, 0.5, 0.5]", "std": "[0.5, 0.5, 0.5]", "interpolation": "bicubic",
    ...     "max_seq_len": "64"}
    >>> inputs = patches_of([Image.new("RGB", (640, 480)), Image.new("RGB", (90, 300))], settings)
    >>> inputs["patches"].shape, inputs["patch_valid"].sum(1).tolist()
    (torch.Size([2, 64, 768]), [63, 56])
    """
    from PIL.Image import Image
    from timm.data.naflex_dataset import NaFlexCollator

    if isinstance(pictures, Image) or not all(isinstance(one, Image) for one in pictures):
        raise TypeError("pictures must be a sequence of PIL images, e.g. [Image.open(file)]")
    if not pictures:
        raise ValueError("pictures is empty; valid: one PIL image or more")
    # Settings come from a file: they are looked at before any picture is decoded.
    transform = transform_of(settings)
    samples = [(transform(picture), 0) for picture in pictures]  # the collator wants labels
    batch, _ = NaFlexCollator(int(settings["max_seq_len"]))(samples)
    return {name: batch[name] for name in INPUTS}


def settings_of(model: Any) -> dict[str, str]:
    """How pictures become the patches of a NaFlexVit: texts by their names, all that
    :func:`patches_of` reads but ``max_seq_len``.
    """
    from timm.data import resolve_data_config

    embeds = model.embeds
    config = resolve_data_config({}, model=model)
    order = CHANNELS_LAST
    if not getattr(embeds, "channels_last", True):  # older releases have no other order
        order = CHANNELS_FIRST
    return {
        "patch_size": json.dumps(embeds.patch_size),
        "patch_order": order,
        "channels": str(embeds.in_chans),
        "mean": json.dumps(config["mean"][: embeds.in_chans]),
        "std": json.dumps(config["std"][: embeds.in_chans]),
        "interpolation": config["interpolation"],
    }


def transform_of(settings: Mapping[str, str]) -> Callable[[Any], Any]:
    """timm's eval transform, from a PIL image of any mode to its patches. Nothing is cropped.

    Raises:
        ValueError: no ``max_seq_len``, or another number of channels than 1 and 3.
        KeyError: another setting is missing.
    """
    from timm.data import create_transform

    if "max_seq_len" not in settings:
        raise ValueError(
            "settings lack max_seq_len: give the metadata of a file that naflex-fast export wrote "
            "without --size"
        )
    channels = settings["channels"]
    if channels not in COLOURS:
        raise ValueError(f"the model takes {channels} channels; pictures have 1 or 3")
    order = {}
    if settings["patch_order"] == CHANNELS_FIRST:
        order["patchify_channels_last"] = False
    transform = create_transform(
        naflex=True,
        patchify=True,
        patch_size=tuple(json.loads(settings["patch_size"])),
        mean=json.loads(settings["mean"]),
        std=json.loads(settings["std"]),
        interpolation=settings["interpolation"],
        max_seq_len=int(settings["max_seq_len"]),
        **order,
    )
    # timm alone would take a photo as the camera lay, and 16 bits as white.
    return lambda picture: transform(convert(picture, COLOURS[channels]))


def convert(image: Any, colours: str) -> Any:
    """A PIL image in 8 bits and upright, as its EXIF data say.

    Pillow alone would make numbers beyond 255 white, and leave a photo as the camera lay. All else
    is Pillow's own: it takes the first of several frames, and drops an alpha channel.

    Args:
        image: as ``Image.open`` gives it.
        colours: Pillow's mode of the result, "L" or "RGB".

    Raises:
        ValueError: its numbers are neither 8 nor 16 bits.
    """
    from PIL import ImageOps

    image.load()  # first: while it decodes a TIFF, Pillow turns it itself
    # Damaged EXIF data raise anything, and say nothing of the picture.
    with suppress(Exception):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("F", "I")):
        image = _scaled(image)
    return image.convert(colours)


def _scaled(image: Any) -> Any:
    """A gray image of 16 bits in 8: 65535 becomes white."""
    import numpy as np
    from PIL import Image

    # Releases of Pillow before 11 hold 16 bits in 32.
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError("its numbers are neither 8 nor 16 bits")
    return Image.fromarray(np.round(values / 257).astype(np.uint8))
