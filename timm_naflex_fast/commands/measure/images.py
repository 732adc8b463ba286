"""Images to measure on: the files of a folder, or scikit-image's photos."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from ...pictures import convert, patches_of
from .output import printable

Source = tuple[str, Callable[[], Any]]  # a name, and a function that opens it as a PIL image

FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # timm's names
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")

# Photos that come with scikit-image itself; it would download the others.
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
PHOTOS_WORDS = f"{len(PHOTOS)} photos of scikit-image, each cropped to 1:3, 2:3, 1:1, 3:2, 3:1"
ASPECTS = ((1, 3), (2, 3), (1, 1), (3, 2), (3, 1))  # width : height


def image_sources(folder: str | Path) -> list[Source]:
    """Name (path inside the folder) and opener of each image file below ``folder``, sorted.

    Raises:
        ValueError: not a folder, or no image in it.
    """
    from PIL import Image

    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{folder} is not a folder of images ({', '.join(SUFFIXES)})")
    return [(printable(path.relative_to(folder)), partial(Image.open, path)) for path in files]


def read(sources: Iterable[Source], skipped: list[str]) -> Iterator[tuple[str, Any]]:
    """Name and picture, upright and in RGB, of each image that can be read.

    The others go to ``skipped``, each with the reason.

    Raises:
        ValueError: none can be read.
    """
    picture = None
    for name, load in sources:
        try:
            with load() as image:
                picture = convert(image, "RGB")
        except Exception as error:  # a damaged file can raise anything in its decoder
            skipped.append(printable(f"{name}: {str(error) or type(error).__name__}"))
        else:
            yield name, picture
    if picture is None:
        raise ValueError(f"none of the images can be read: {'; '.join(skipped)}")


def naflex_batches(
    sources: Iterable[Source], settings: Mapping[str, str], batch_size: int, skipped: list[str]
) -> Iterator[tuple[dict[str, Any], None]]:
    """Images as batches of timm's NaFlex collator, without labels.

    Args:
        sources: in the order wanted; see :func:`image_sources`.
        settings: see :func:`patches_of`.
        batch_size: images per batch.
        skipped: gets the images that cannot be read, each with the reason.

    Raises:
        ValueError: none can be read, or the model takes other channels than pictures have.
    """
    images = read(sources, skipped)
    while group := list(islice(images, batch_size)):
        yield patches_of([picture for _, picture in group], settings), None


def photos() -> list[Source]:
    """scikit-image's photos, each cropped from its middle to each aspect ratio.

    Raises:
        RuntimeError: scikit-image is not installed.
    """
    if find_spec("skimage") is None:
        raise RuntimeError(
            "without --images DIR scikit-image's photos are taken, and it is not installed: "
            "pip install scikit-image"
        )
    return [
        (f"{name} {wide}:{high}", partial(_photo, name, wide, high))
        for name, (wide, high) in product(PHOTOS, ASPECTS)
    ]


def _photo(name: str, wide: int, high: int) -> Any:
    """One of scikit-image's photos, cropped to ``wide``:``high``."""
    import skimage.data
    from PIL import Image, ImageOps

    # The largest cut of this aspect ratio, in the picture's own resolution.
    image = Image.fromarray(getattr(skimage.data, name)())
    scale = min(image.width / wide, image.height / high)
    return ImageOps.fit(image, (int(scale * wide), int(scale * high)))
