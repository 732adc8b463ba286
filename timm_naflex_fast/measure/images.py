"""Images to measure on: the files of a folder, or scikit-image's photos."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Source = tuple[str, Callable[[], Any]]  # a name, and a function that opens it as a PIL image
T = TypeVar("T")

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")

# Photos that come with scikit-image itself; it would download the others.
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
ASPECTS = ((1, 3), (2, 3), (1, 1), (3, 2), (3, 1))  # width : height
PHOTOS_WORDS = f"{len(PHOTOS)} photos of scikit-image, each cropped to " + ", ".join(f"{w}:{h}" for w, h in ASPECTS)


def unreadable_errors() -> tuple[type[Exception], ...]:
    """What Pillow raises on a file that is no image, is cut off, or would fill the memory."""
    from PIL import Image

    return (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


def image_files(folder: str | Path) -> list[Path]:
    """The image files under ``folder``, searched recursively, in the order of their paths.

    Raises:
        ValueError: not a readable folder, or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder of images ({', '.join(SUFFIXES)})")
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{root} holds no image; looked for {', '.join(SUFFIXES)}")
    return files


def image_sources(folder: str | Path) -> list[Source]:
    """Name (path inside the folder) and opener of each image under ``folder``; errors as in :func:`image_files`."""
    from PIL import Image

    return [(str(path.relative_to(folder)), partial(Image.open, path)) for path in image_files(folder)]


def read_shapes(folder: str | Path, shape_of: Callable[[int, int], T]) -> tuple[list[T], list[str]]:
    """Read the size of each image under ``folder`` from its header; no pixel is decoded.

    Args:
        folder: searched recursively.
        shape_of: called with height and width in pixels; its ValueError means that the image cannot be used.

    Returns:
        What ``shape_of`` gave, in file order; and a line for each file that cannot be read, with the reason.

    Raises:
        ValueError: not a readable folder, or no readable image in it.
    """
    from PIL import Image

    shapes, skipped = [], []
    for name, load in image_sources(folder):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with load() as image:
                    width, height = image.size
            shapes.append(shape_of(height, width))
        except unreadable_errors() as error:
            skipped.append(f"{name}: {error}")
    if not shapes:
        raise ValueError(f"none of the images in {folder} can be read: {'; '.join(skipped)}")
    return shapes, skipped


def photos() -> list[Source]:
    """scikit-image's photos, each cropped from its middle to each aspect ratio.

    Raises:
        RuntimeError: scikit-image is not installed.
    """
    try:
        import skimage.data
        from PIL import Image, ImageOps
    except ImportError as error:
        raise RuntimeError(
            "without --images DIR, drift is measured on scikit-image's photos: pip install scikit-image"
        ) from error

    def crop(name: str, wide: int, high: int) -> Any:
        image = Image.fromarray(getattr(skimage.data, name)())
        scale = min(image.width / wide, image.height / high)
        return ImageOps.fit(image, (int(scale * wide), int(scale * high)))

    # Neighbours in the list differ in photo and in aspect ratio.
    turned = [
        (name, ASPECTS[(p + turn) % len(ASPECTS)]) for turn in range(len(ASPECTS)) for p, name in enumerate(PHOTOS)
    ]
    return [(f"{name} {w}:{h}", partial(crop, name, w, h)) for name, (w, h) in turned]
