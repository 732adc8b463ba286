"""From pictures to what an exported model takes; the file itself tells how."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("patches", "patch_coord", "patch_valid")
CHANNELS_FIRST = "channel, y, x"
NEEDED = ("patch_size", "patch_order", "channels", "mean", "std", "interpolation", "max_seq_len")

SCALED = "with 16 or 32 bits per pixel, scaled to 8 bits"
TURNED = "turned upright, as their EXIF data say"
FRAMES = "with further frames, of which the first is taken"
EXIF_ORIENTATION = 0x0112


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
        ValueError: no picture, infinity or NaN in one; or settings that are missing, as in a file
            for plain images, or name another number of channels than 1 and 3.

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
    transform = _transform(settings)
    colours = {"1": "L", "3": "RGB"}[settings["channels"]]
    samples = []
    for picture in pictures:
        # timm's transform would take a photo as the camera lay, and 16 bits as white.
        converted, _ = convert(picture, colours)
        samples.append((transform(converted), 0))  # the collator wants a label
    batch, _ = NaFlexCollator(int(settings["max_seq_len"]))(samples)
    return {name: batch[name] for name in INPUTS}


def _transform(settings: Mapping[str, str]) -> Any:
    """timm's eval transform, from a PIL image to its patches."""
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise ValueError(
            f"settings lack {', '.join(missing)}: give the metadata of a file that naflex-fast "
            "export wrote without --size"
        )
    if settings["channels"] not in ("1", "3"):
        raise ValueError(f"pictures have 1 or 3 channels; the model takes {settings['channels']}")
    return patch_transform(
        channels_last=settings["patch_order"] != CHANNELS_FIRST,
        patch_size=tuple(json.loads(settings["patch_size"])),
        mean=json.loads(settings["mean"]),
        std=json.loads(settings["std"]),
        interpolation=settings["interpolation"],
        max_seq_len=int(settings["max_seq_len"]),
    )


def convert(image: Any, colours: str) -> tuple[Any, list[str]]:
    """A PIL image in 8 bits, upright, and what had to be done: of ``SCALED``, ``TURNED``, ``FRAMES``.

    Pillow alone would make numbers beyond 255 white, and leave a photo as the camera lay. All else
    is Pillow's own conversion: it drops an alpha channel.

    Args:
        image: as ``Image.open`` gives it.
        colours: Pillow's mode of the result, "L" or "RGB".

    Raises:
        ValueError: infinity or NaN among its numbers.
    """
    from PIL import ImageOps

    done = []
    # Asked before the picture is decoded: to look for more of them moves to the next.
    if getattr(image, "is_animated", False):
        done.append(FRAMES)
    image.load()  # first: while it decodes a TIFF, Pillow turns it itself
    if orientation(image) in range(2, 9):
        image = ImageOps.exif_transpose(image)
        done.append(TURNED)
    if image.mode.startswith(("F", "I")):
        image = _scaled(image)
        done.append(SCALED)
    return image.convert(colours), done


def orientation(image: Any) -> int:
    """How the picture lies, as EXIF numbers it; 1 is upright."""
    from PIL.Image import Image

    try:
        # The method of Pillow's PNG images would decode one to look for EXIF data.
        return Image.getexif(image).get(EXIF_ORIENTATION, 1)
    except Exception:  # damaged EXIF data raise anything, and say nothing of the picture
        return 1


def _scaled(image: Any) -> Any:
    """A gray image of 16 or 32 bits, integers or floats, in 8 bits.

    0 becomes black; 65535 becomes white, or 1.0 where the numbers are floats, or 255 where they are
    integers of 32 bits and none is larger. Where a number lies outside, the picture's smallest
    number becomes black and its largest white.
    """
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds infinity or NaN")
    black = 0.0
    white = 1.0 if image.mode == "F" else 65535.0
    if image.mode == "I" and values.max() <= 255:  # 8 bits in a wider array
        white = 255.0
    if values.min() < black or values.max() > white:
        black = values.min()
        white = max(values.max(), black + 1e-6)  # all numbers may be the same one
    # From black to white, 0 to 255.
    shares = (values - black) / (white - black)
    return Image.fromarray(np.round(255 * shares).astype(np.uint8))


def patch_transform(channels_last: bool, **settings: Any) -> Any:
    """timm's eval transform, from a PIL image to its patches.

    Args:
        channels_last: whether a patch is (y, x, channel), and not (channel, y, x).
        settings: patch_size, mean, std, interpolation and max_seq_len, as timm takes them.
    """
    from timm.data import create_transform

    if not channels_last:
        settings["patchify_channels_last"] = False
    return create_transform(naflex=True, patchify=True, **settings)
