"""Models and images to measure on: timm's model factory, and images through timm's own NaFlex transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..images import Source, unreadable_errors
from .command import DTYPES

RANDOM = "stand-in: random, untrained, seed 0; position table of sines and cosines"


def load_model(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    random_weights: bool = False,
    dtype: str = "float32",
    patch_size: int | None = None,
) -> tuple[nn.Module, str]:
    """Create a timm NaFlexVit in eval mode, and say in words which weights it holds.

    Args:
        name: a timm model name, e.g. ``naflexvit_base_patch16_siglip.v2_webli``.
        checkpoint: a local file that timm can load; without it the pretrained weights come from the hub.
        random_weights: keep the initialisation (seed 0), but make a learned position table of sines and cosines:
            neighbouring cells of a trained table are alike, those of noise are not.
        dtype: one of ``DTYPES``, to which the whole model is cast.
        patch_size: other than the model's own, its patch kernels are resampled.

    Raises:
        ValueError: timm does not know the name, the model is no NaFlexVit, or has no such patch size; an unknown
            dtype; a checkpoint that cannot be read, or is of another model.
        FileNotFoundError: no such checkpoint.
        RuntimeError: the pretrained weights could not be had; says how to give them.
    """
    import timm

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be measured; valid: {', '.join(DTYPES)}")
    if patch_size is not None and patch_size < 1:
        raise ValueError(f"patch_size must be at least 1; got {patch_size}")
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"no checkpoint at {checkpoint}; give a file of weights for {name!r} (.safetensors or .pth)"
        )
    naflex = timm.list_models("naflexvit*")
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"timm has no model {name!r}; valid: {', '.join(naflex)}")
    how: dict[str, Any] = dict(pretrained=not random_weights)
    if patch_size is not None:
        how["enable_patch_interpolator"] = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if random_weights:
            weights, model = RANDOM, timm.create_model(name, **how)
        elif checkpoint is not None:
            weights = f"file {Path(checkpoint).name}"
            with reading(checkpoint):
                # As an overlay, timm converts keys and shapes as it does for weights from the hub.
                model = timm.create_model(name, **how, pretrained_cfg_overlay=dict(file=str(checkpoint)))
        else:
            weights = f"pretrained, {name}"
            try:
                model = timm.create_model(name, **how)
            except Exception as error:  # whatever the hub's client raises
                raise RuntimeError(
                    f"the pretrained weights of {name!r} could not be loaded ({_one_line(error)}); "
                    "give a local file with --checkpoint FILE, or --random-weights to measure an untrained model"
                ) from error
    if not hasattr(model, "embeds"):
        raise ValueError(f"{name!r} is no NaFlexVit; valid: {', '.join(naflex)}")
    if random_weights:
        _smooth_table(model.embeds)
    if patch_size is not None:
        _check_patch_size(model.embeds, patch_size, name)
    return model.eval().to(getattr(torch, dtype)), weights


@contextmanager
def reading(checkpoint: str | Path) -> Iterator[None]:
    """Turn whatever reading a file of weights raises into a ValueError of one line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # a cut-off safetensors file, a pickle of something else, tensors of another model
        raise ValueError(f"the checkpoint {checkpoint} cannot be loaded ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return words if len(words) <= 300 else f"{words[:300]} ..."


def _smooth_table(embeds: Any) -> None:
    from timm.layers import build_sincos2d_pos_embed

    table = embeds.pos_embed
    if table is not None:
        with torch.no_grad():
            table.copy_(build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3]).view(table.shape))


def _check_patch_size(embeds: Any, patch_size: int, name: str) -> None:
    own = tuple(embeds.patch_size)
    if own != (patch_size, patch_size) and (not embeds.is_linear or embeds.norm_input is not None):
        raise ValueError(f"{name!r} takes patches of {own[0]}x{own[1]} pixels only; leave --patch-size out")


class NaFlexImages:
    """Images as NaFlex batches without labels, through timm's eval transforms and collation.

    Args:
        sources: (name, function that opens it as a PIL image), in the order wanted; see ``images.image_sources``.
        model: its data configuration (mean, std, interpolation) and patch size are used.
        max_seq_len: most patches an image is resized to; of several, every image comes once at each.
        batch_size: images per batch.
        patch_size: pixels along a patch's side, where it is not the model's own.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        model: nn.Module,
        max_seq_len: int | Sequence[int] = 256,
        batch_size: int = 16,
        patch_size: int | None = None,
    ) -> None:
        from timm.data import create_transform, resolve_data_config
        from timm.data.naflex_transforms import Patchify

        lengths = [max_seq_len] if isinstance(max_seq_len, int) else list(max_seq_len)
        if not lengths or min(*lengths, batch_size) < 1:
            raise ValueError(f"max_seq_len and batch_size must be at least 1; got {lengths} and {batch_size}")
        config = resolve_data_config(model=model)
        own = tuple(model.embeds.patch_size)  # type: ignore[union-attr, arg-type]
        size = own if patch_size is None else (patch_size, patch_size)
        keep = {key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")}
        self._resize = {
            length: create_transform(**keep, naflex=True, patch_size=size, max_seq_len=length) for length in lengths
        }
        # The patches of another size go in as rows and columns, so that the model sees what size they have.
        self._patchify = Patchify(size, flatten_patches=size == own)
        self._sources, self._batch_size = list(sources), batch_size
        self.skipped: list[str] = []

    def __len__(self) -> int:
        return -(-len(self._sources) // self._batch_size) * len(self._resize)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], None]]:
        """Batches in order, with a list of "names"; an image that cannot be decoded is skipped, listed in ``skipped``.

        Raises:
            ValueError: none could be decoded.
        """
        self.skipped = []
        for length, resize in self._resize.items():
            yield from self._batches(length, resize)
        if len(self.skipped) == len(self._sources):
            raise ValueError(f"none of the images can be read: {'; '.join(self.skipped)}")

    def _batches(self, length: int, resize: Callable[[Any], Tensor]) -> Iterator[tuple[dict[str, Any], None]]:
        from timm.data.naflex_dataset import NaFlexCollator

        collate = NaFlexCollator(max_seq_len=length)
        names: list[str] = []
        samples: list[tuple[dict[str, Tensor], int]] = []
        for place, (name, load) in enumerate(self._sources):
            try:
                with load() as image:
                    samples.append((self._patchify(resize(image.convert("RGB"))), 0))
                names.append(name)
            except unreadable_errors() as error:
                line = f"{name}: {error}"
                self.skipped += [line] * (line not in self.skipped)
            if len(samples) == self._batch_size or (samples and place == len(self._sources) - 1):
                yield {**collate(samples)[0], "names": names}, None
                names, samples = [], []
