"""Embed a folder of images of any shape with the SigLIP-2 NaFlex tower.

In batches, and exactly as one by one.

uv run examples/siglip2_embed.py DIR --out embeddings.safetensors
... --checkpoint model.safetensors    # offline
... --library transformers            # its model

The file holds ``embeddings`` (N, D), pooled and not normalised, and in its metadata, as JSON,
``paths`` (N, relative to DIR, sorted), ``settings`` and ``skipped`` (what could not be read, and
why). An interrupted run continues where it stopped when started again; so does a finished one, with
images that are new in the folder. An image is known by its path: one that was replaced keeps its
embedding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.data.naflex_dataset import NaFlexCollator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import timm_naflex_fast
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.images import eval_transform, image_files
from timm_naflex_fast.commands.measure.models import fingerprint, load_model
from timm_naflex_fast.commands.measure.output import positive
from timm_naflex_fast.pictures import convert

MODELS = {
    "timm": "naflexvit_base_patch16_siglip.v2_webli",
    "transformers": "google/siglip2-base-patch16-naflex",
}
NOTHING_POOLED = "the tower has no head that pools, so there is no embedding of an image"
Settings = dict[str, Any]
Sample = dict[str, Tensor]
Batch = tuple[list[int], Sample | None, dict[int, str]]


class SettingsDiffer(ValueError):
    """The output was begun with another model, other weights or other settings."""


class Tower(NamedTuple):
    """A model, where its weights are from, and the way from images to its output."""

    model: nn.Module
    weights: str
    read: Callable[[Image.Image], Sample]
    collate: Callable[[list[Sample]], Sample]
    forward: Callable[[Sample], Tensor]


def timm_tower(options: argparse.Namespace) -> Tower:
    """A NaFlexVit, with timm's own eval transform and collation."""
    model, weights = load_model(
        options.model, options.checkpoint, random_weights=options.random_weights
    )
    if model.global_pool == "":
        raise ValueError(NOTHING_POOLED)
    model.reset_classifier(0)
    transform = eval_transform(model, options.max_seq_len, options.interpolation)
    collate = partial(collated, NaFlexCollator(options.max_seq_len))
    return Tower(model, weights, transform, collate, model)


def transformers_tower(options: argparse.Namespace) -> Tower:
    """The vision tower of a Siglip2 model.

    Of the hub, or of the folder that ``save_pretrained`` wrote.
    """
    from transformers import Siglip2ImageProcessor, Siglip2VisionModel

    if options.random_weights or options.checkpoint:
        raise ValueError(
            "--library transformers takes its weights from --model, a name on the hub or a folder"
        )
    model = Siglip2VisionModel.from_pretrained(options.model).eval()
    if not getattr(model.config, "vision_use_head", True):
        raise ValueError(NOTHING_POOLED)
    sizes = dict(patch_size=model.config.patch_size, max_num_patches=options.max_seq_len)
    try:
        processor = Siglip2ImageProcessor.from_pretrained(options.model, **sizes)
    except OSError:  # no image processor was saved there
        processor = Siglip2ImageProcessor(**sizes)
        print(f"{options.model} has no preprocessor_config.json: SigLIP-2's own settings are used")

    def forward(batch: Sample) -> Tensor:
        return model(**batch).pooler_output

    read = partial(processor, return_tensors="pt")
    return Tower(model, options.model, read, concatenated, forward)


TOWERS = {"timm": timm_tower, "transformers": transformers_tower}


def collated(collator: NaFlexCollator, samples: list[Sample]) -> Sample:
    batch = collator([(sample, 0) for sample in samples])[0]
    return {key: batch[key] for key in ("patches", "patch_coord", "patch_valid")}


def concatenated(samples: list[Sample]) -> Sample:
    return {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}


class Images(Dataset):
    """Item i: (i, the image as the tower reads it, or why it cannot be read)."""

    def __init__(self, files: list[Path], read: Callable[[Image.Image], Sample]) -> None:
        self._files = files
        self._read = read

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[int, Sample | str]:
        try:
            with Image.open(self._files[index]) as image:
                return index, self._read(convert(image, "RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return index, str(error)


def readable(
    collate: Callable[[list[Sample]], Sample], items: list[tuple[int, Sample | str]]
) -> Batch:
    """The readable items of a batch, collated, and what cannot be read.

    Returns:
        The indices of the readable ones; their batch, None if there is none; {index: why not}.
    """
    indices: list[int] = []
    samples: list[Sample] = []
    unreadable: dict[int, str] = {}
    for index, item in items:
        if isinstance(item, str):
            unreadable[index] = item
        else:
            indices.append(index)
            samples.append(item)
    batch = collate(samples) if samples else None
    return indices, batch, unreadable


class Output:
    """The embeddings so far: a finished file, and beside it the parts of an unfinished run.

    Every file is complete or absent: it is written under another name and then renamed.

    Raises:
        SettingsDiffer: what is there was made with other settings; says which.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._settings = settings
        self._parts = path.with_name(path.name + ".parts")
        self._pending: dict[str, Tensor] = {}
        self.done: set[str] = set()
        for file in self._files():
            self.done.update(self._paths_of(file))

    def _files(self) -> list[Path]:
        parts = sorted(self._parts.glob("*.safetensors"))
        if self._path.exists():
            return [self._path, *parts]
        return parts

    def _paths_of(self, file: Path) -> list[str]:
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
        except SafetensorError:
            metadata = {}
        if not {"settings", "paths"} <= metadata.keys():
            raise SettingsDiffer(
                f"{file} was not written by siglip2_embed.py; choose another --out"
            )
        self._check_settings(file, json.loads(metadata["settings"]))
        return json.loads(metadata["paths"])

    def _check_settings(self, file: Path, theirs: Settings) -> None:
        differ = []
        for key in {**theirs, **self._settings}:
            there = theirs.get(key)
            now = self._settings.get(key)
            if there != now:
                differ.append(f"{key} {there} there, {now} now")
        if differ:
            raise SettingsDiffer(
                f"{file} holds embeddings made otherwise ({'; '.join(differ)}); "
                "choose another --out"
            )

    def add(self, paths: list[str], embeddings: Tensor) -> None:
        """Keep the embeddings (B, D) in memory until the next :meth:`save`."""
        self._pending.update(zip(paths, embeddings.unbind()))

    def save(self) -> None:
        """Write what was added since the last time as one part."""
        if not self._pending:
            return
        self._parts.mkdir(parents=True, exist_ok=True)
        numbers = [int(part.stem) for part in self._parts.glob("*.safetensors")]
        number = max(numbers, default=-1) + 1
        self._write(self._parts / f"{number:08}.safetensors", self._pending, {})
        self._pending = {}

    def finish(self, skipped: dict[str, str]) -> int:
        """Make one file of everything saved, and remove the parts; how many embeddings it holds."""
        rows: dict[str, Tensor] = {}
        for file in self._files():
            with safe_open(file, "pt") as opened:
                rows.update(zip(self._paths_of(file), opened.get_tensor("embeddings").unbind()))
        if rows:
            self._write(self._path, dict(sorted(rows.items())), skipped)
        for part in self._parts.glob("*"):
            part.unlink()
        if self._parts.exists():
            self._parts.rmdir()
        return len(rows)

    def _write(self, file: Path, rows: dict[str, Tensor], skipped: dict[str, str]) -> None:
        metadata = {
            "paths": json.dumps(list(rows)),
            "settings": json.dumps(self._settings),
            "skipped": json.dumps(skipped),
        }
        embeddings = torch.stack(list(rows.values()))  # (N, D)
        unfinished = file.with_name(file.name + ".unfinished")
        save_file({"embeddings": embeddings}, unfinished, metadata)
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, file)


def embed(tower: Tower, batch: Sample, device: str, dtype: torch.dtype) -> Tensor:
    """Pooled outputs (B, D) of a collated batch, on the CPU."""
    inputs = {}
    for key, value in batch.items():
        value = value.to(device, non_blocking=True)
        if value.is_floating_point():
            value = value.to(dtype)
        inputs[key] = value
    return tower.forward(inputs).cpu()


@torch.inference_mode()
def run(options: argparse.Namespace) -> int:
    """Embed what is not yet embedded and write the file.

    Raises:
        ValueError: no folder of images, or SettingsDiffer.
        RuntimeError, OSError: weights or files that cannot be had.
    """
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: no CUDA GPU here; valid: cpu")
    files = image_files(options.images)
    options.model = options.model or MODELS[options.library]
    tower = TOWERS[options.library](options)
    settings = {
        "model": options.model,
        "weights_sha256": fingerprint(tower.model),
        "max_seq_len": options.max_seq_len,
        "dtype": options.dtype,
    }
    if options.library == "timm":  # transformers' processor has its own
        settings["interpolation"] = options.interpolation
    tower.model.to(options.device, getattr(torch, options.dtype))
    output = Output(options.out, settings)

    left: dict[str, Path] = {}
    for file in files:
        name = file.relative_to(options.images).as_posix()
        if name not in output.done:
            left[name] = file
    done = len(files) - len(left)
    print(
        f"{len(left):,} images to embed, {done:,} done before; weights: {tower.weights}",
        flush=True,
    )
    skipped = embed_all(tower, left, output, options)
    count = output.finish(skipped)
    for name, why in skipped.items():
        print(f"skipped, not readable as an image: {name}: {why}", file=sys.stderr)
    if not count:
        raise ValueError(f"none of the {len(files):,} images in {options.images} could be read")
    print(f"{options.out}: {count:,} embeddings, {len(skipped):,} images skipped")
    return 0


def embed_all(
    tower: Tower, files: dict[str, Path], output: Output, options: argparse.Namespace
) -> dict[str, str]:
    """Add the embeddings of the files to ``output``; {name: why} of those that cannot be read."""
    names = list(files)
    loader = DataLoader(
        Images(list(files.values()), tower.read),
        options.batch_size,
        collate_fn=partial(readable, tower.collate),
        num_workers=options.workers,
    )
    dtype = getattr(torch, options.dtype)
    skipped: dict[str, str] = {}
    saved = time.monotonic()
    try:
        with timm_naflex_fast.enable(model=tower.model):
            for indices, batch, unreadable in tqdm(loader, "embedding"):
                for index, why in unreadable.items():
                    skipped[names[index]] = why
                if batch is not None:
                    embeddings = embed(tower, batch, options.device, dtype)
                    output.add([names[index] for index in indices], embeddings)
                if time.monotonic() - saved >= options.save_every:
                    output.save()
                    saved = time.monotonic()
    finally:
        output.save()
    return skipped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", metavar="DIR", help="folder of images, searched recursively")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="safetensors file to write or continue",
    )
    parser.add_argument("--library", choices=TOWERS, default="timm", help="whose model (timm)")
    parser.add_argument(
        "--model",
        help="a timm NaFlexVit, or a Siglip2 model of transformers or its folder (SigLIP-2)",
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)"
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="an untrained model, to try the script"
    )
    parser.add_argument(
        "--max-seq-len",
        type=positive,
        default=256,
        metavar="N",
        help="most patches per image (256)",
    )
    parser.add_argument(
        "--interpolation",
        choices=("bilinear", "bicubic"),
        default="bilinear",
        help="of timm's pictures: bilinear, as SigLIP-2 was trained; timm's settings say bicubic",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=16, metavar="B", help="images per batch (16)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the model and the embeddings (float32)",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that read images (0: this one)",
    )
    parser.add_argument(
        "--save-every", type=float, default=30, metavar="S", help="seconds at risk if killed (30)"
    )
    return cli.call("siglip2_embed.py", run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
