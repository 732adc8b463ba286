"""Images to measure drift on, through timm's own NaFlex transforms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..images import Source, unreadable_errors


class NaFlexImages:
    """Images as NaFlex batches without labels, through timm's eval transforms and collation.

    Args:
        sources: (name, function that opens it as a PIL image), in the order wanted; see ``images.image_sources``.
        model: its data configuration (mean, std, interpolation) and patch size are used.
        max_seq_len: most patches an image is resized to.
        batch_size: images per batch.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(self, sources: Sequence[Source], model: Any, max_seq_len: int = 256, batch_size: int = 16) -> None:
        from timm.data import create_transform, resolve_data_config

        if min(max_seq_len, batch_size) < 1:
            raise ValueError(f"max_seq_len and batch_size must be at least 1; got {max_seq_len} and {batch_size}")
        config = resolve_data_config(model=model)
        keep = {key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")}
        size = tuple(model.embeds.patch_size)
        self._prepare = create_transform(**keep, naflex=True, patch_size=size, max_seq_len=max_seq_len, patchify=True)
        self._sources, self._length, self._batch_size = list(sources), max_seq_len, batch_size
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return -(-len(self._sources) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], None]]:
        """Batches in order, with a list of "names"; an image that cannot be decoded is skipped, listed in ``skipped``.

        Raises:
            ValueError: none could be decoded.
        """
        from timm.data.naflex_dataset import NaFlexCollator

        self.skipped = []
        collate = NaFlexCollator(max_seq_len=self._length)
        names: list[str] = []
        samples: list[tuple[dict[str, Tensor], int]] = []
        for place, (name, load) in enumerate(self._sources):
            try:
                with load() as image:
                    samples.append((self._prepare(image.convert("RGB")), 0))
                names.append(name)
            except unreadable_errors() as error:
                self.skipped.append(f"{name}: {error}")
            if len(samples) == self._batch_size or (samples and place == len(self._sources) - 1):
                yield {**collate(samples)[0], "names": names}, None
                names, samples = [], []
        if len(self.skipped) == len(self._sources):
            raise ValueError(f"none of the images can be read: {'; '.join(self.skipped)}")
