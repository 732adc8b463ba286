"""What is timed: a position table and the grids of a batch, as models and data sets in use have
them.

Importing this file needs neither torch nor timm, so a command's options can name the workloads.
"""

import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from ..images import image_sources, read, size
from ..output import printable

Grid = tuple[int, int]
Draw = Callable[[random.Random, int], Grid]
DRAWN_IMAGE = 2**20  # pixels of the images from which grids of a given aspect ratio are made


@dataclass(frozen=True)
class Workload:
    """A table, how it is resampled, and ``draw``: a sample's grid (h, w), by a random generator and
    its number.

    Attributes:
        more: further options of timm's NaFlexEmbeds, without their "pos_embed_".
        length: tokens to which a batch is padded; 0: as many as its longest image has.
    """

    name: str
    table: Grid
    mode: str
    draw: Draw
    more: dict[str, Any] = field(default_factory=dict)
    length: int = 0

    def grids(self, batch: int) -> list[Grid]:
        """The grids of a batch, always the same ones; a smaller batch is the beginning of a larger
        one."""
        source = random.Random(f"{self.name} 0")
        return [self.draw(source, number) for number in range(batch)]

    def coordinates(self, batch: int) -> Iterator[Any]:
        """Coordinates (B, N, 2) of batch after batch, all the same."""
        return repeat(coordinates(self.grids(batch), self.length))

    def embeds(self, channels: int) -> Any:
        """timm's NaFlexEmbeds with this table (and a projection that is not used)."""
        from timm.models.naflexvit import NaFlexEmbeds

        options = {f"pos_embed_{key}": value for key, value in self.more.items()}
        options |= dict(
            pos_embed="learned", pos_embed_grid_size=self.table, pos_embed_interp_mode=self.mode
        )
        return NaFlexEmbeds(1, 1, channels, class_token=False, proj_type="linear", **options)

    def possible(self) -> bool:
        """Whether the installed timm can have such a table."""
        from timm.models.naflexvit import NaFlexEmbeds

        return {f"pos_embed_{key}" for key in self.more} <= {
            *inspect.signature(NaFlexEmbeds).parameters
        }


def fit(height: float, width: float, tokens: int, patch: int = 16) -> Grid:
    """The grid (h, w) of an image of ``height`` x ``width`` pixels in at most ``tokens`` patches,
    as timm resizes it.

    Raises:
        ValueError: timm cannot scale such an image to so many patches.
    """
    from timm.data.naflex_transforms import get_image_size_for_seq

    _, (h, w) = get_image_size_for_seq((height, width), patch, tokens)
    return h // patch, w // patch


def fit_aspect(aspect: float, tokens: int) -> Grid:
    """The grid of a large image whose width is ``aspect`` times its height."""
    return fit(math.sqrt(DRAWN_IMAGE / aspect), math.sqrt(DRAWN_IMAGE * aspect), tokens)


def coordinates(grids: list[Grid], length: int = 0) -> Any:
    """Coordinates (B, N, 2) of the tokens (y, x), int64, as timm's collator makes them: row-major,
    then (0, 0).

    Args:
        grids: of the samples.
        length: N; the most tokens of a sample if it is 0.
    """
    import torch

    coord = torch.zeros(len(grids), length or max(h * w for h, w in grids), 2, dtype=torch.int64)
    for sample, (h, w) in zip(coord, grids):
        sample[: h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).view(-1, 2)
    return coord


def read_sizes(
    folder: str | Path, max_seq_len: int = 256, patch_size: int = 16
) -> tuple[list[Grid], list[str]]:
    """Read the size of every image under ``folder`` from its header, and the grid that timm would
    resize it to.

    Args:
        folder: searched recursively; no pixel is decoded.
        max_seq_len: most patches an image is resized to.
        patch_size: pixels along a patch's side.

    Returns:
        The grids in file order, and a line for each file that could not be read.

    Raises:
        ValueError: not a folder, or no readable image in it.
    """
    sources, unreadable = image_sources(folder), list[str]()
    found = read(sources, lambda image: fit(*size(image), max_seq_len, patch_size), unreadable)
    return [grid for _, grid in found], unreadable


def folder_workload(
    folder: str | Path, grids: list[Grid], like: Workload, length: int = 0
) -> Workload:
    """Batches drawn evenly from all these grids, each one once before any comes again; the table of
    ``like``.

    From wide to tall they are numbered; the numbers' bits in reverse order lead through all shapes
    again and again, so a small batch has the shapes of the whole folder.
    """
    ordered = sorted(grids, key=lambda grid: (grid[0] / grid[1], grid))
    order = sorted(range(len(grids)), key=lambda place: f"{place:064b}"[::-1])
    name = printable(Path(folder).resolve().name)
    return replace(
        like, name=name, length=length, draw=lambda _, number: ordered[order[number % len(order)]]
    )


# Width over height, the commonest first; the shapes that photographs in ImageNet mostly have.
ASPECTS = (4 / 3, 3 / 2, 3 / 4, 1.0, 2 / 3, 16 / 9, 7 / 5, 5 / 7, 9 / 16, 2.0, 1 / 2, 7 / 3)
ZIPF = [1 / rank for rank in range(1, len(ASPECTS) + 1)]


def siglip_grids(tokens: int) -> Draw:
    """Aspect ratios from 1:3 to 3:1, even in the logarithm, as large as fits ``tokens``."""
    return lambda source, _: fit_aspect(math.exp(source.uniform(-math.log(3), math.log(3))), tokens)


def _extreme(source: random.Random, _: int) -> Grid:
    n = source.randint(1, 576)
    h, w = source.choice([(1, n), (2, 288), (3, 190), (4, 144)])
    return (h, w) if source.random() < 0.5 else (w, h)


def _uniform(low: int, high: int) -> Draw:
    return lambda source, _: (source.randint(low, high), source.randint(low, high))


RADIO = dict(antialias=False, align_corners=True, ar_preserving=True)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", (16, 16), "bilinear", _uniform(24, 24)),
        Workload(
            "imagenet",
            (16, 16),
            "bicubic",
            lambda source, _: fit_aspect(source.choices(ASPECTS, ZIPF)[0], 576),
        ),
        Workload("siglip", (16, 16), "bilinear", siglip_grids(256)),
        Workload("diverse", (32, 32), "bicubic", _uniform(4, 31)),  # timm issue 2514's own
        Workload("extreme", (16, 16), "bicubic", _extreme),
        Workload("radio", (128, 128), "bilinear", _uniform(16, 48), RADIO),
    )
}
