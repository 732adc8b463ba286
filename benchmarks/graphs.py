"""Count what torch.compile and torch.export make of a whole model: no clock takes part, so it holds on every machine.

uv run benchmarks/measure.py graphs        # some minutes

20 training batches of 8 images with other grids each go through a NaFlexVit and a Siglip2 tower of two blocks. A break
is a place where Dynamo leaves the graph; recompiled are graphs that a later batch made necessary. In export the batch
and the number of tokens are dynamic; what the program computes, the tests compare.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from timm_naflex_fast import enable
from timm_naflex_fast.measure.bench import compiled
from timm_naflex_fast.measure.bench.workloads import coordinates, siglip_grids

BATCHES, IMAGES, DEPTH, WIDTH = 20, 8, 2, 64
CONTENDERS = {
    "timm": ("stock", "timm's grid_sample", "interpolate_cached", "grid_sample", "matmul"),
    "transformers": ("stock", "interpolate_cached", "matmul"),
}
# How the model is compiled, and the numbers of tokens of the batches, in turn.
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "compile, one length": ({}, (256,)),
    "compile, four lengths": ({}, (64, 128, 196, 256)),
    "dynamic=True": ({"dynamic": True}, (64, 128, 196, 256)),
    "fullgraph=True": ({"fullgraph": True}, (64, 128, 196, 256)),
    "export": ({}, (64, 128, 196)),
}


def make(library: str, contender: str) -> torch.nn.Module:
    """A small model of a library, the same for every contender."""
    torch.manual_seed(0)
    if library == "timm":
        import timm

        own = dict(depth=DEPTH, embed_dim=WIDTH, num_heads=2, num_classes=5)
        flag = contender == "timm's grid_sample"
        model = timm.create_model("naflexvit_base_patch16_siglip", **own, pos_embed_use_grid_sample=flag)
        torch.nn.init.normal_(model.embeds.pos_embed)
        return model
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    own = dict(num_hidden_layers=DEPTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=2)
    return Siglip2VisionModel(Siglip2VisionConfig(**own, attn_implementation="sdpa"))


def draw(library: str, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of images of other shapes each, padded to ``tokens``, as the model's ``forward`` takes it."""
    source = random.Random(seed)
    grids = [siglip_grids(tokens)(source, number) for number in range(IMAGES)]
    patches = torch.randn(IMAGES, tokens, 768, generator=torch.Generator().manual_seed(seed))
    lengths = torch.tensor([[h * w] for h, w in grids])
    valid = torch.arange(tokens) < lengths
    if library == "timm":
        return {"patches": patches, "patch_coord": coordinates(grids, tokens), "patch_valid": valid}
    names = "pixel_values", "pixel_attention_mask", "spatial_shapes"
    return dict(zip(names, (patches, valid.long(), torch.tensor(grids))))


def result(library: str, run: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a model makes of a batch."""
    return run(batch) if library == "timm" else run(**batch).pooler_output


def count(library: str, contender: str, way: str) -> dict[str, Any]:
    """The graphs, breaks and recompiled graphs of one way, or what it raised."""
    model, (options, lengths) = make(library, contender), WAYS[way]
    with ExitStack() as on:
        if contender not in ("stock", "timm's grid_sample"):
            on.enter_context(enable(contender, library=library))
        if way == "export":
            return export(library, model.eval(), lengths[0])

        def step(run: Any, batch: Any) -> None:
            result(library, run, batch).square().sum().backward()

        batches = [draw(library, lengths[number % len(lengths)], number) for number in range(BATCHES)]
        found = compiled.measure(model, batches, step, backend="aot_eager", **options)
    graphs, breaks, recompiled, _ = found.values()
    return {"graphs": graphs, "breaks": breaks, "recompiled": recompiled}


def export(library: str, model: torch.nn.Module, length: int) -> dict[str, Any]:
    """Export with dynamic sizes: it works or raises."""
    batch = draw(library, length, 0)
    images, tokens = torch.export.Dim("images", min=1, max=64), torch.export.Dim("tokens", min=2, max=4096)
    sizes = {name: {0: images} if name == "spatial_shapes" else {0: images, 1: tokens} for name in batch}
    args, named, free = ((batch,), None, (sizes,)) if library == "timm" else ((), batch, sizes)
    torch.export.export(model, args, named, dynamic_shapes=free)
    return {}


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """A row for each library, way and contender; the error's first line where it fails."""
    for library, way in [("timm", "export")] if tiny else product(CONTENDERS, WAYS):
        for contender in CONTENDERS[library]:
            try:
                found = count(library, contender, way)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
            yield [{"library": library, "way": way, "contender": contender, **found}]
