"""Images to measure on: the files of a folder or scikit-image's photos, and their way into a
model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

from .output import printable

Source = tuple[str, Callable[[], Any]]  # a name, and a function that opens it as a PIL image
T = TypeVar("T")

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")

COLOURS = {1: "L", 3: "RGB"}  # Pillow's mode by a model's channels
# Photos that come with scikit-image itself; it would download the others.
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
ASPECTS = ((1, 3), (2, 3), (1, 1), (3, 2), (3, 1))  # width : height
PHOTOS_WORDS = f"{len(PHOTOS)} photos of scikit-image, each cropped to " + ", ".join(
    f"{w}:{h}" for w, h in ASPECTS
)


def image_files(folder: str | Path) -> list[Path]:
    """The image files under ``folder``, in the order of their paths.

    Raises:
        ValueError: not a folder, or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder of images ({', '.join(SUFFIXES)})")
    found = sorted(
        path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not found:
        raise ValueError(f"{root} holds no image; looked for {', '.join(SUFFIXES)}")
    return found


def image_sources(folder: str | Path) -> list[Source]:
    """Name (path inside the folder) and opener of each image under ``folder``; errors as in
    :func:`image_files`."""
    from PIL import Image

    return [
        (printable(path.relative_to(folder)), partial(Image.open, path))
        for path in image_files(folder)
    ]


def read(
    sources: Sequence[Source], use: Callable[[Any], T], skipped: list[str]
) -> Iterator[tuple[str, T]]:
    """Name and ``use(image)`` of each image; one that cannot be read goes to ``skipped``, with the
    reason.

    Raises:
        ValueError: none can be read.
    """
    for name, load in sources:
        try:
            with load() as image:
                result = use(image)
        except Exception as error:  # a damaged file can raise anything in its decoder
            skipped.append(printable(f"{name}: {error or type(error).__name__}"))
        else:
            yield name, result
    if len(skipped) == len(sources):
        raise ValueError(f"none of the images can be read: {'; '.join(skipped)}")


class NaFlexImages:
    """Images as NaFlex batches without labels, through timm's eval transforms and collation.

    Args:
        sources: in the order wanted; see :func:`image_sources`.
        model: its data configuration (mean, std, interpolation) and patch size are used.
        max_seq_len: most patches an image is resized to.
        batch_size: images per batch.

    Raises:
        ValueError: the model takes neither 1 nor 3 channels.
    """

    def __init__(
        self, sources: Sequence[Source], model: Any, max_seq_len: int = 256, batch_size: int = 16
    ) -> None:
        from timm.data import create_transform, resolve_data_config

        config = resolve_data_config(model=model)
        channels = model.embeds.in_chans
        if channels not in COLOURS:
            raise ValueError(
                f"the model takes {channels} channels per image; images are read with 1 or 3"
            )
        keep = {key: config[key] for key in ("input_size", "interpolation", "crop_pct")}
        keep |= {key: config[key][:channels] for key in ("mean", "std")}
        size = tuple(model.embeds.patch_size)
        self._prepare = create_transform(
            **keep, naflex=True, patch_size=size, max_seq_len=max_seq_len, patchify=True
        )
        self._colours = COLOURS[channels]
        self._sources, self._length, self._batch_size = sources, max_seq_len, batch_size
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return -(-len(self._sources) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], None]]:
        """Batches in order, with a list of "names"; in the end ``skipped`` lists the images that
        cannot be decoded.

        Raises:
            ValueError: none could be decoded.
        """
        from timm.data.naflex_dataset import NaFlexCollator

        skipped, collate = list[str](), NaFlexCollator(max_seq_len=self._length)
        samples = read(
            self._sources, lambda image: (self._prepare(image.convert(self._colours)), 0), skipped
        )
        while batch := list(islice(samples, self._batch_size)):
            names, prepared = zip(*batch)
            yield {**collate(prepared)[0], "names": names}, None
        self.skipped = skipped


def photos() -> list[Source]:
    """scikit-image's photos, each cropped from its middle to each aspect ratio.

    Raises:
        RuntimeError: scikit-image is not installed.
    """
    if find_spec("skimage") is None:
        raise RuntimeError(
            "drift without --images DIR needs scikit-image's photos: pip install scikit-image"
        )
    import skimage.data
    from PIL import Image, ImageOps

    def crop(name: str, wide: int, high: int) -> Any:
        image = Image.fromarray(getattr(skimage.data, name)())
        scale = min(image.width / wide, image.height / high)
        return ImageOps.fit(image, (int(scale * wide), int(scale * high)))

    # Neighbours in the list differ in photo and in aspect ratio: the numbers of photos and of
    # ratios share no factor.
    pairs = islice(zip(cycle(PHOTOS), cycle(ASPECTS)), len(PHOTOS) * len(ASPECTS))
    return [(f"{name} {w}:{h}", partial(crop, name, w, h)) for name, (w, h) in pairs]
