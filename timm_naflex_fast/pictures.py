"""From pictures to what an exported model takes; the file itself tells how."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .measure.export import CHANNELS_FIRST
from .measure.images import convert, patch_transform

INPUTS = ("patches", "patch_coord", "patch_valid")
NEEDED = ("patch_size", "patch_order", "channels", "mean", "std", "interpolation", "max_seq_len")


def patches_of(pictures: Sequence[Any], settings: Mapping[str, str]) -> dict[str, Tensor]:
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
