"""scikit-image's photos, cropped to several aspect ratios: images to measure on where none were given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# Those that come with the package itself; the others it would download.
NAMES = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
ASPECTS = ((1, 3), (2, 3), (1, 1), (3, 2), (3, 1))  # width : height
WORDS = f"{len(NAMES)} photos of scikit-image, each cropped to " + ", ".join(f"{w}:{h}" for w, h in ASPECTS)


def photos() -> list[tuple[str, Callable[[], Any]]]:
    """(name, function that opens it) per photo and aspect ratio: the largest crop from the middle.

    Raises:
        RuntimeError: scikit-image is not installed.
    """
    try:
        import skimage.data  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "without --images DIR, drift is measured on scikit-image's photos: pip install scikit-image"
        ) from error
    found: list[tuple[str, Callable[[], Any]]] = []
    for turn in range(len(ASPECTS)):  # neighbours in the list differ in photo and aspect
        for place, name in enumerate(NAMES):
            w, h = ASPECTS[(place + turn) % len(ASPECTS)]
            found.append((f"{name} {w}:{h}", partial(_open, name, w, h)))
    return found


def _open(name: str, wide: int, high: int) -> Any:
    import skimage.data
    from PIL import Image

    image = Image.fromarray(getattr(skimage.data, name)())
    scale = min(image.width / wide, image.height / high)
    width, height = int(scale * wide), int(scale * high)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
