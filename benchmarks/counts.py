"""What is counted holds on every machine: the cost of a step, and the graphs of a model.

uv run benchmarks/measure.py counts graphs        # some minutes
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import product
from typing import Any

import timm
import torch
from costs import counting
from torch._subclasses.fake_tensor import FakeTensorMode

from timm_naflex_fast import enable
from timm_naflex_fast.measure.bench import model as whole
from timm_naflex_fast.measure.bench.pos_embed import race
from timm_naflex_fast.measure.bench.race import PLAIN_ADD
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates, siglip_grids

Rows = list[dict[str, Any]]
TRACEABLE = "matmul, traceable"
CONTENDERS = ("stock", "timm-flag-bilinear", "matmul", TRACEABLE, PLAIN_ADD)
NARROW = (16, 32)  # channels; with fewer, a token is no larger than its coordinates
BATCHES, IMAGES, DEPTH, WIDTH = 20, 8, 2, 64
LIBRARIES = {"timm": ["stock", "timm's grid_sample", "interpolate_cached", "grid_sample", "matmul"]}
LIBRARIES |= {"transformers": ["stock", "interpolate_cached", "matmul"]}
# How the model is compiled, and the numbers of tokens of the batches, in turn.
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "compile, one length": ({}, (256,)),
    "compile, four lengths": ({}, (64, 128, 196, 256)),
    "dynamic=True": ({"dynamic": True}, (64, 128, 196, 256)),
    "fullgraph=True": ({"fullgraph": True}, (64, 128, 196, 256)),
    "export": ({}, (64,)),
}


def count_step(name: str, workload: str, batch: int, phase: str, channels: int) -> dict[str, int]:
    """The cost of one step of a contender at ``channels``. It has run before, so its caches are
    full."""
    with FakeTensorMode() if name == TRACEABLE else nullcontext(), ExitStack() as stack:
        work, names = WORKLOADS[workload], [name.split(",")[0]]
        (contender,) = race(work, batch, "float32", phase, names, stack, "cpu", channels).contenders
        if name != "stock":  # which caches nothing, and takes long
            contender.run(contender.prepare())
        argument = contender.prepare()
        with counting() as count:
            contender.run(argument)
    return count


def count_race(
    workload: str, batch: int, phase: str, names: Sequence[str] = CONTENDERS, channels: int = 768
) -> Rows:
    """A row per contender: what the race is, and its counts at ``channels``, on the line through
    two widths."""
    grids, rows, (low, high) = WORKLOADS[workload].grids(batch), [], NARROW
    about = dict(workload=workload, phase=phase, batch=batch, dtype="float32", channels=channels)
    about |= dict(tokens=sum(h * w for h, w in grids), grids=len(set(grids)))
    for name in names:
        widths = (channels, channels) if name == TRACEABLE else NARROW
        small, large = (count_step(name, workload, batch, phase, width) for width in widths)
        counts = {
            key: n + (large[key] - n) * (channels - low) // (high - low) for key, n in small.items()
        }
        rows.append({**about, "contender": name, **counts})
    return rows


def steps(tiny: bool) -> Iterator[Rows]:
    """What one step of the position embedding would cost on a GPU: see ``benchmarks/costs.py``.

    timm's code and ``eager`` read coordinates, and so run on numbers. The traceable form, which
    graphs hold and CUDA graphs capture, reads none: it runs on PyTorch's fake tensors, which have
    no numbers.

    The operators do not depend on the number of channels, so bytes are linear in it: a step on
    numbers is counted at two small widths and extended to 768, one on fake tensors at 768.
    """
    for workload, phase in product(("siglip", "diverse"), ("infer", "train")):
        yield count_race(workload, 2 if tiny else 512, phase)


def make(library: str, sampled: bool) -> torch.nn.Module:
    """A small model of a library; ``sampled``: by timm's grid_sample."""
    if library == "timm":
        small = dict(depth=DEPTH, embed_dim=WIDTH, num_heads=2, num_classes=5)
        return timm.create_model(
            "naflexvit_base_patch16_siglip", **small, pos_embed_use_grid_sample=sampled
        )
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    small = dict(
        num_hidden_layers=DEPTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=2
    )
    return Siglip2VisionModel(Siglip2VisionConfig(**small, attn_implementation="sdpa"))


def draw(library: str, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of images of other shapes each, padded to ``tokens``, as the model's ``forward``
    takes it."""
    source, grid = random.Random(seed), siglip_grids(tokens)
    grids = [grid(source, number) for number in range(IMAGES)]
    patches, valid = (
        torch.randn(IMAGES, tokens, 768),
        torch.arange(tokens) < torch.tensor([[h * w] for h, w in grids]),
    )
    if library == "timm":
        return dict(x=patches, patch_coord=coordinates(grids, tokens), patch_valid=valid)
    return dict(
        pixel_values=patches, pixel_attention_mask=valid.long(), spatial_shapes=torch.tensor(grids)
    )


def count_graphs(library: str, contender: Any, way: str) -> dict[str, Any]:
    """The graphs, breaks and recompiled graphs of one way; nothing of an export, which works or
    raises."""
    sampled, (options, lengths) = contender == "timm's grid_sample", WAYS[way]
    model = make(library, sampled)
    with nullcontext() if sampled or contender == "stock" else enable(contender, library=library):
        if way == "export":
            batch = draw(library, lengths[0], 0)
            free = {
                0: torch.export.Dim("images", max=64),
                1: torch.export.Dim("tokens", min=2, max=4096),
            }
            sizes = {name: {0: free[0]} if name == "spatial_shapes" else free for name in batch}
            torch.export.export(model.eval(), (), batch, dynamic_shapes=sizes)
            return {}

        def train(run: Any, batch: Any) -> None:
            out = run(**batch)
            getattr(out, "pooler_output", out).square().sum().backward()

        batches = [
            draw(library, lengths[number % len(lengths)], number) for number in range(BATCHES)
        ]
        counted = whole.count_graphs(model, batches, train, backend="aot_eager", **options)
    return dict(zip(("graphs", "breaks", "recompiled"), counted.values()))


def graphs(tiny: bool) -> Iterator[Rows]:
    """A row for each library, way and contender; the error's first line where it fails.

    20 training batches of 8 images with other grids each go through a NaFlexVit and a Siglip2 tower
    of two blocks. A break is a place where Dynamo leaves the graph; recompiled are graphs that a
    later batch made necessary. In export the batch and the number of tokens are dynamic; what the
    program computes, the tests compare.
    """
    for library, way in [("timm", "export")] if tiny else product(LIBRARIES, WAYS):
        for contender in LIBRARIES[library]:
            try:
                result = count_graphs(library, contender, way)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
            yield [{"library": library, "way": way, "contender": contender, **result}]
