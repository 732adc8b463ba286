"""What is counted holds on every machine: the cost of a step, and the graphs of a model."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, product
from typing import Any

import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.benchmarks.costs import counting
from lab.benchmarks.pos_embed import BATCH, PLAIN_ADD, SHOWN, WORKLOADS, Row, sides
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure.bench import model as whole
from timm_naflex_fast.commands.measure.bench.workloads import coordinates, siglip_grids

TRACEABLE = "matmul, traceable"
CONTENDERS = ("stock", "timm-flag-bilinear", "matmul", TRACEABLE, PLAIN_ADD)
BATCHES = 20
IMAGES = 8  # of a batch
DEPTH = 2
WIDTH = 64
LIBRARIES = {
    "timm": ["stock", "timm's grid_sample", "interpolate_cached", "grid_sample", "matmul"],
    "transformers": ["stock", "interpolate_cached", "matmul"],
}
# How the model is compiled, and the numbers of tokens of the batches, in turn.
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "compile, one length": ({}, (256,)),
    "compile, four lengths": ({}, (64, 128, 196, 256)),
    "dynamic=True": ({"dynamic": True}, (64, 128, 196, 256)),
    "fullgraph=True": ({"fullgraph": True}, (64, 128, 196, 256)),
    "export": ({}, (64,)),
}


def count_step(name: str, workload: str, batch: int, channels: int) -> dict[str, int]:
    """The cost of one training step of a contender, which has run before: its caches are full."""
    with ExitStack() as stack:
        if name == TRACEABLE:
            stack.enter_context(FakeTensorMode())
        strategy = name.split(",")[0]
        made = sides(WORKLOADS[workload], batch, "train", [strategy], stack, channels)
        (ready,) = made.values()
        for _ in range(2):
            work = ready()
            with counting() as count:
                work()
    return count


def count_race(
    workload: str, batch: int, names: Sequence[str] = CONTENDERS, channels: int = 768
) -> list[Row]:
    """A row per contender: what the race is, and its counts."""
    tokens = sum(h * w for h, w in WORKLOADS[workload].grids(batch))
    facts = dict(workload=workload, phase="train", batch=batch, tokens=tokens)
    rows = []
    for name in names:
        counted = count_step(name, workload, batch, channels)
        rows.append({**facts, "contender": name, **counted})
    return rows


def counts() -> Iterator[list[Row]]:
    """What one training step of the position embedding would cost on a GPU: see costs.py.

    timm's code and our eager code read coordinates, and so run on numbers. The traceable form,
    which graphs hold and CUDA graphs capture, reads none: it runs on PyTorch's fake tensors, which
    have no numbers.
    """
    for workload in SHOWN:
        yield count_race(workload, BATCH)


def make(library: str, sampled: bool) -> torch.nn.Module:
    """A small model of a library; ``sampled``: by timm's grid_sample."""
    if library == "timm":
        return timm.create_model(
            "naflexvit_base_patch16_siglip",
            depth=DEPTH,
            embed_dim=WIDTH,
            num_heads=2,
            num_classes=5,
            pos_embed_use_grid_sample=sampled,
        )
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        num_hidden_layers=DEPTH,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    return Siglip2VisionModel(config)


def draw(library: str, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of images of other shapes each, as the model's ``forward`` takes it.

    ``tokens`` is the number that all are padded to.
    """
    source = random.Random(seed)
    grid = siglip_grids(tokens)
    grids = [grid(source) for _ in range(IMAGES)]
    shapes = torch.tensor(grids)  # (B, 2)
    patches = torch.randn(IMAGES, tokens, 768)
    valid = torch.arange(tokens) < shapes.prod(1, keepdim=True)  # (B, N)
    if library == "timm":
        return dict(x=patches, patch_coord=coordinates(grids, tokens), patch_valid=valid)
    return dict(pixel_values=patches, pixel_attention_mask=valid.long(), spatial_shapes=shapes)


def train(run: Any, batch: Any) -> None:
    """The forward and backward pass of one batch."""
    out = run(**batch)
    loss = getattr(out, "pooler_output", out).square().sum()
    loss.backward()


def export(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Export a model for any number of images and of tokens."""
    images = torch.export.Dim("images", max=64)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    sizes = {}
    for name in batch:
        sizes[name] = {0: images}
        if name != "spatial_shapes":
            sizes[name][1] = tokens
    torch.export.export(model.eval(), (), batch, dynamic_shapes=sizes)


def count_graphs(library: str, contender: Any, way: str) -> dict[str, Any]:
    """The graphs, breaks and recompiled graphs of one way.

    Of an export nothing: it works or raises.
    """
    options, lengths = WAYS[way]
    sampled = contender == "timm's grid_sample"
    model = make(library, sampled)
    with ExitStack() as stack:
        if not sampled and contender != "stock":
            stack.enter_context(enable(contender, library=library))
        if way == "export":
            export(model, draw(library, lengths[0], seed=0))
            return {}
        batches = []
        for number, length in zip(range(BATCHES), cycle(lengths)):
            batches.append(draw(library, length, seed=number))
        counted, _ = whole.count_graphs(model, batches, train, backend="aot_eager", **options)
    return dict(zip(("graphs", "breaks", "recompiled"), counted.values()))


def graphs() -> Iterator[list[Row]]:
    """A row for each library, way and contender; the error's first line where it fails.

    20 training batches of 8 images with other grids each go through a NaFlexVit and a Siglip2 tower
    of two blocks. A break is a place where Dynamo leaves the graph; recompiled are graphs that a
    later batch made necessary. In export the batch and the number of tokens are dynamic; what the
    program computes, the tests compare.
    """
    for library, way in product(LIBRARIES, WAYS):
        for contender in LIBRARIES[library]:
            try:
                result = count_graphs(library, contender, way)
            except Exception as error:
                first_line = str(error).strip().splitlines()[0]
                result = {"error": f"{type(error).__name__}: {first_line}"}
            yield [{"library": library, "way": way, "contender": contender, **result}]
