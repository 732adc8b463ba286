"""Models and images to measure on: timm's model factory, and folders through timm's own NaFlex transforms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def load_model(
    name: str, checkpoint: str | Path | None = None, *, random_weights: bool = False
) -> tuple[nn.Module, str]:
    """Create a timm NaFlexVit in eval mode, and say in words which weights it holds.

    Args:
        name: a timm model name, e.g. ``naflexvit_base_patch16_siglip.v2_webli``.
        checkpoint: a local file that timm can load; without it the pretrained weights come from the hub.
        random_weights: leave the initialisation as it is, and say so.

    Raises:
        ValueError: timm does not know the name, or the model is no NaFlexVit.
        FileNotFoundError: no such checkpoint.
        RuntimeError: the pretrained weights could not be had; says how to give them.
    """
    import timm

    if checkpoint is not None and not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"no checkpoint at {checkpoint}; give a file of weights for {name!r} (.safetensors or .pth)"
        )
    source: dict[str, Any] = dict(pretrained=not random_weights)
    weights = "random, untrained" if random_weights else f"pretrained, {name}"
    if checkpoint is not None:
        # As an overlay, timm applies the same key and shape conversions as to weights from the hub.
        source["pretrained_cfg_overlay"] = dict(file=str(checkpoint))
        weights = f"file {Path(checkpoint).name}"
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"timm has no model {name!r}; valid: {', '.join(timm.list_models('naflexvit*'))}")
    try:
        model = timm.create_model(name, **source).eval()
    except Exception as error:
        if random_weights or checkpoint is not None:
            raise
        raise RuntimeError(
            f"the pretrained weights of {name!r} could not be loaded ({type(error).__name__}: {error}); "
            "give a local file with --checkpoint FILE, or --random-weights to measure an untrained model"
        ) from error
    if not hasattr(model, "embeds"):
        raise ValueError(f"{name!r} is no NaFlexVit; valid: {', '.join(timm.list_models('naflexvit*'))}")
    return model, weights


class ImageFolder:
    """The images of a folder as NaFlex batches without labels, through timm's eval transforms and collation.

    Args:
        folder: searched recursively for images.
        model: its data configuration (mean, std, interpolation) and patch size are used.
        max_seq_len: most patches an image is resized to.
        batch_size: images per batch.

    Raises:
        ValueError: not a readable folder, or no image in it.
    """

    def __init__(self, folder: str | Path, model: nn.Module, max_seq_len: int = 256, batch_size: int = 16) -> None:
        from timm.data import create_transform, resolve_data_config

        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; --images takes a folder of images ({', '.join(SUFFIXES)})")
        try:
            self.files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
        except OSError as error:
            raise ValueError(f"{root} cannot be read: {error}") from error
        if not self.files:
            raise ValueError(f"{root} holds no image; looked for {', '.join(SUFFIXES)}")
        config = resolve_data_config(model=model)
        self._transform = create_transform(
            **{key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")},
            naflex=True,
            patch_size=model.embeds.patch_size,  # type: ignore[union-attr]
            max_seq_len=max_seq_len,
            patchify=True,
        )
        self._max_seq_len, self._batch_size = max_seq_len, batch_size
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return -(-len(self.files) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], None]]:
        """Batches in file order; a file that cannot be decoded is skipped and listed in ``skipped``."""
        from PIL import Image
        from timm.data.naflex_dataset import NaFlexCollator

        collate = NaFlexCollator(max_seq_len=self._max_seq_len)
        self.skipped = []
        samples: list[tuple[dict[str, Tensor], int]] = []
        for path in self.files:
            try:
                with Image.open(path) as image:
                    samples.append((self._transform(image.convert("RGB")), 0))
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                self.skipped.append(f"{path.name}: {error}")
            if len(samples) == self._batch_size:
                yield collate(samples)[0], None
                samples = []
        if samples:
            yield collate(samples)[0], None
