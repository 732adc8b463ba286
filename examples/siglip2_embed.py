"""Embed a folder of pictures of any shape with the SigLIP-2 NaFlex tower.

uv run examples/siglip2_embed.py DIR --out embeddings.safetensors
... --checkpoint model.safetensors    # offline
... --library transformers            # its model

The file holds ``embeddings`` (N, D), float32, not normalised, and as metadata the ``paths`` of the
N pictures, a JSON list.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import timm_naflex_fast
from timm_naflex_fast.commands.cli.main import call
from timm_naflex_fast.commands.measure.images import image_sources, read
from timm_naflex_fast.commands.measure.models import load_errors, load_model
from timm_naflex_fast.commands.measure.output import (
    check_writable,
    progress,
    require,
    written_whole,
)
from timm_naflex_fast.pictures import patches_of, settings_of

TIMM = "naflexvit_base_patch16_siglip.v2_webli"
TRANSFORMERS = "google/siglip2-base-patch16-naflex"


def timm_tower(options: argparse.Namespace) -> tuple[Any, Callable[[list[Any]], Tensor]]:
    """timm's model, and what makes embeddings (B, D) of B pictures."""
    name = options.model or TIMM
    model, weights = load_model(name, options.checkpoint, random_weights=options.random_weights)
    print(f"weights: {weights}")
    model.reset_classifier(0)
    settings = settings_of(model)
    settings["max_seq_len"] = str(options.max_seq_len)
    settings["interpolation"] = "bilinear"  # as SigLIP-2 was trained; timm's settings say bicubic
    return model, lambda pictures: model(patches_of(pictures, settings))


def transformers_tower(options: argparse.Namespace) -> tuple[Any, Callable[[list[Any]], Tensor]]:
    """The same with transformers' model, of the hub or of a folder."""
    require("--library transformers", "transformers", "torchvision")
    name = options.model or TRANSFORMERS
    with load_errors(f"transformers' {name}", "--model takes a folder with its files, too"):
        from transformers import Siglip2ImageProcessor, Siglip2VisionModel

        model = Siglip2VisionModel.from_pretrained(name).eval()
        sizes = dict(patch_size=model.config.patch_size, max_num_patches=options.max_seq_len)
        processor = Siglip2ImageProcessor.from_pretrained(name, **sizes)

    def embed(pictures: list[Any]) -> Tensor:
        return model(**processor(pictures, return_tensors="pt")).pooler_output

    return model, embed


TOWERS = {"timm": timm_tower, "transformers": transformers_tower}


def embed_folder(options: argparse.Namespace) -> int:
    """Embed the pictures in batches, and write the file."""
    # What can be wrong is found out before the work.
    check_writable(options.out)
    sources = image_sources(options.images)
    model, embed = TOWERS[options.library](options)
    skipped: list[str] = []
    paths = []
    pictures = []
    embeddings = []
    with timm_naflex_fast.enable(model=model), torch.inference_mode():
        for path, picture in read(progress("pictures", sources), skipped):
            paths.append(path)
            pictures.append(picture)
            if len(pictures) == options.batch_size:
                embeddings.append(embed(pictures))
                pictures = []
        if pictures:
            embeddings.append(embed(pictures))

    with written_whole(options.out) as file:
        save_file({"embeddings": torch.cat(embeddings)}, file, {"paths": json.dumps(paths)})
    for line in skipped:
        print(f"not readable as a picture: {line}", file=sys.stderr)
    print(f"{options.out}: {len(paths):,} embeddings, {len(skipped):,} pictures skipped")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", metavar="DIR", help="folder of pictures, searched recursively")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write")
    parser.add_argument("--library", choices=TOWERS, default="timm", help="whose model (timm)")
    parser.add_argument("--model", help="a name, or for transformers a folder (SigLIP-2 base)")
    parser.add_argument("--checkpoint", metavar="FILE", help="timm: local weights")
    parser.add_argument("--random-weights", action="store_true", help="timm: untrained")
    parser.add_argument("--max-seq-len", type=int, default=256, help="most patches (256)")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures in a batch (16)")
    sys.exit(call("siglip2_embed.py", embed_folder, parser.parse_args()))
