"""Images to measure on: the files of a folder, or scikit-image's photos."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from ...pictures import settings_of, transform_of
from .output import printable

Source = tuple[str, Callable[[], Any]]  # a name, and a function that opens it as a PIL image

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


def read(
    sources: Iterable[Source], use: Callable[[Any], Any], skipped: list[str]
) -> Iterator[tuple[str, Any]]:
    """Name and ``use(image)`` of each image that can be read.

    The others go to ``skipped``, each with the reason.

    Raises:
        ValueError: none can be read.
    """
    found = None
    for name, load in sources:
        try:
            with load() as image:
                found = use(image)
        except Exception as error:  # a damaged file can raise anything in its decoder
            skipped.append(printable(f"{name}: {str(error) or type(error).__name__}"))
        else:
            yield name, found
    if found is None:
        raise ValueError(f"none of the images can be read: {'; '.join(skipped)}")


def naflex_batches(
    sources: Iterable[Source],
    transform: Callable[[Any], Any],
    max_seq_len: int,
    batch_size: int,
    skipped: list[str],
) -> Iterator[tuple[dict[str, Any], None]]:
    """Images as batches of timm's NaFlex collator, without labels.

    Args:
        sources: in the order wanted; see :func:`image_sources`.
        transform: see :func:`eval_transform`.
        max_seq_len: patches to which images are padded.
        batch_size: images per batch.
        skipped: gets the images that cannot be read, each with the reason.

    Raises:
        ValueError: none can be read.
    """
    from timm.data.naflex_dataset import NaFlexCollator

    collate = NaFlexCollator(max_seq_len)
    images = read(sources, transform, skipped)
    while group := list(islice(images, batch_size)):
        batch, _ = collate([(sample, 0) for _, sample in group])  # it wants labels
        yield batch, None


def eval_transform(
    model: Any, max_seq_len: int, interpolation: str | None = None
) -> Callable[[Any], Any]:
    """timm's eval transform for the model: from any PIL image to patches, as the model reads them.

    Args:
        model: a NaFlexVit of 1 or 3 channels; its data configuration is used.
        max_seq_len: most patches an image is resized to.
        interpolation: filter of the resize, in place of the data configuration's.

    Raises:
        ValueError: the model takes no patches, or other channels than pictures have.
    """
    check_takes_patches(model)
    settings = settings_of(model) | {"max_seq_len": str(max_seq_len)}
    if interpolation:
        settings["interpolation"] = interpolation
    return transform_of(settings)


def check_takes_patches(model: Any) -> None:
    """Find out whether a NaFlexVit takes patches.

    Raises:
        ValueError: it takes plain images alone.
    """
    if not model.embeds.is_linear:
        raise ValueError(
            "the model's patch embedding is a convolution, which takes no patches; valid: "
            "embed_proj_type='linear', or export --size H W"
        )


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
