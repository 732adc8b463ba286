"""The workload of somebody's own images: the grids that timm would make of them, from the files' headers alone."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from ..drift.inputs import SUFFIXES
from .workloads import Grid, Workload, fit


@dataclass(frozen=True)
class Sizes:
    """The grids of a folder's images, in file order, and the files that could not be read, each with the reason."""

    folder: str
    grids: list[Grid]
    unreadable: list[str]

    @property
    def distinct(self) -> int:
        """How many different grids there are."""
        return len(set(self.grids))


def read_sizes(folder: str | Path, max_seq_len: int = 256, patch_size: int = 16) -> Sizes:
    """Read the size of every image under ``folder``, without decoding a pixel, and the grid timm resizes it to.

    Args:
        folder: searched recursively.
        max_seq_len: most patches an image is resized to.
        patch_size: pixels along a patch's side.

    Raises:
        ValueError: not a folder, no readable image in it, or a number below 1.
    """
    from PIL import Image

    if max_seq_len < 1 or patch_size < 1:
        raise ValueError(f"max_seq_len and patch_size must be at least 1; got {max_seq_len} and {patch_size}")
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; --sizes-from takes a folder of images ({', '.join(SUFFIXES)})")
    grids, unreadable = [], []
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # nothing is decompressed
                with Image.open(path) as image:
                    width, height = image.size
            grids.append(fit(height, width, max_seq_len, patch_size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            unreadable.append(f"{path.relative_to(root)}: {error}")
    if not grids:
        why = f"; not readable: {'; '.join(unreadable)}" if unreadable else f"; looked for {', '.join(SUFFIXES)}"
        raise ValueError(f"{root} holds no image to read{why}")
    return Sizes(str(folder), grids, unreadable)


def folder_workload(sizes: Sizes, like: Workload) -> Workload:
    """Batches drawn from a folder's grids in random order, each image once before any comes again.

    The table and its options are those of ``like``.
    """
    return replace(like, name=Path(sizes.folder).resolve().name, draw=_Deck(sizes.grids))


class _Deck:
    """Draws without replacement; starts anew with each new generator and whenever all were drawn."""

    def __init__(self, grids: list[Grid]) -> None:
        self._grids, self._left = grids, list[Grid]()
        self._source: random.Random | None = None

    def __call__(self, source: random.Random) -> Grid:
        if source is not self._source:
            self._left, self._source = [], source
        if not self._left:
            self._left = source.sample(self._grids, len(self._grids))
        return self._left.pop()
