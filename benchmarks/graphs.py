"""Count what torch.compile and torch.export make of a whole model: no clock takes part, so it holds on every machine.

uv run benchmarks/measure.py graphs        # some minutes

20 training batches of 8 images with other grids each go through a NaFlexVit and a Siglip2 tower of two blocks. A break
is a place where Dynamo leaves the graph; recompiled are graphs that a later batch made necessary. In export the batch
and the number of tokens are dynamic; what the program computes, the tests compare.
"""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import timm
import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel

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
    "export": ({}, (64,)),
}


def make(library: str, flag: bool) -> torch.nn.Module:
    """A small model of a library; ``flag``: by timm's grid_sample."""
    if library == "timm":
        own = dict(depth=DEPTH, embed_dim=WIDTH, num_heads=2, num_classes=5)
        return timm.create_model("naflexvit_base_patch16_siglip", **own, pos_embed_use_grid_sample=flag)
    own = dict(num_hidden_layers=DEPTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=2)
    return Siglip2VisionModel(Siglip2VisionConfig(**own, attn_implementation="sdpa"))


def draw(library: str, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of images of other shapes each, padded to ``tokens``, as the model's ``forward`` takes it."""
    source, grid = random.Random(seed), siglip_grids(tokens)
    grids = [grid(source, number) for number in range(IMAGES)]
    patches, valid = torch.randn(IMAGES, tokens, 768), torch.arange(tokens) < torch.tensor([[h * w] for h, w in grids])
    if library == "timm":
        return dict(patches=patches, patch_coord=coordinates(grids, tokens), patch_valid=valid)
    return dict(pixel_values=patches, pixel_attention_mask=valid.long(), spatial_shapes=torch.tensor(grids))


def count(library: str, contender: str, way: str) -> dict[str, Any]:
    """The graphs, breaks and recompiled graphs of one way; nothing of an export, which works or raises."""
    flag, (options, lengths) = contender == "timm's grid_sample", WAYS[way]
    model = make(library, flag)
    with nullcontext() if flag or contender == "stock" else enable(contender, library=library):
        if way == "export":
            batch = draw(library, lengths[0], 0)
            free = {0: torch.export.Dim("images", max=64), 1: torch.export.Dim("tokens", min=2, max=4096)}
            sizes = {name: {0: free[0]} if name == "spatial_shapes" else free for name in batch}
            args, named, shapes = ((batch,), None, (sizes,)) if library == "timm" else ((), batch, sizes)
            torch.export.export(model.eval(), args, named, dynamic_shapes=shapes)
            return {}

        def step(run: Any, batch: Any) -> None:
            (run(batch) if library == "timm" else run(**batch).pooler_output).square().sum().backward()

        batches = [draw(library, lengths[number % len(lengths)], number) for number in range(BATCHES)]
        found = compiled.measure(model, batches, step, backend="aot_eager", **options)
    return dict(zip(("graphs", "breaks", "recompiled"), found.values()))


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """A row for each library, way and contender; the error's first line where it fails."""
    for library, way in [("timm", "export")] if tiny else product(CONTENDERS, WAYS):
        for contender in CONTENDERS[library]:
            try:
                found = count(library, contender, way)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
            yield [{"library": library, "way": way, "contender": contender, **found}]
