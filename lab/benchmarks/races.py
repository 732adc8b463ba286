"""Races of rotary embeddings, patch kernels and transformers' Siglip2.

Each function here yields the rows of race after race, for measure.py. pos_embed.py has those of the position embedding.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.pos_embed import WORKLOADS, Row, always, time_race
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure.bench.workloads import Grid, coordinates
from timm_naflex_fast.commands.measure.racing import Ready
from timm_naflex_fast.names import BASELINE
from timm_naflex_fast.pos_embed import kept

HEADS = 6
HEAD_DIM = 64
DEPTH = 2
KERNELS = 768
WIDTH = 768  # of Siglip2
PATCHES = (((32, 32), (16, 16)), ((16, 16), (32, 32)), ((16, 16), (8, 8)), ((16, 16), (14, 20)))


def compute_step(
    compute: Callable[[], Tensor], train: bool, leaves: Iterable[Tensor], upstream: Tensor
) -> None:
    """The forward; in training also the backward, by the gradient ``upstream`` of the result."""
    with torch.set_grad_enabled(train):
        out = compute()
    if train:
        for leaf in leaves:
            leaf.grad = None
        out.backward(upstream)


def rope() -> Iterator[list[Row]]:
    """timm's ``NaFlexVit._generate_rope_naflex`` alone, on ``diverse`` grids.

    "infer" makes the embeddings, mixed ones block by block, each dropped before the next. "train",
    of mixed ones alone, keeps all blocks' and computes the gradient of the frequencies.
    """
    cases = (("axial", "infer"), ("mixed", "infer"), ("mixed", "train"))
    for (kind, phase), batch in product(cases, (1, 64)):
        facts = dict(workload=kind, phase=phase, batch=batch)
        with ExitStack() as stack:
            yield time_race(facts, _rope_sides(kind, phase, batch, stack))


def _rope_sides(kind: str, phase: str, batch: int, stack: ExitStack) -> dict[str, Ready]:
    coord = coordinates(WORKLOADS["diverse"].grids(batch))
    x = torch.zeros(()).expand(*coord.shape[:2], HEADS * HEAD_DIM)  # only its shape and dtype count
    upstream = torch.randn(batch, HEADS, coord.shape[1], 2 * HEAD_DIM)

    def infer(model: Any) -> None:
        with torch.no_grad():
            embeddings = model._generate_rope_naflex(x, coord)
            for block in [embeddings] if isinstance(embeddings, Tensor) else embeddings:
                del block

    def train(model: Any) -> None:
        model.rope.freqs.grad = None
        embeddings = list(model._generate_rope_naflex(x, coord))
        torch.autograd.backward(embeddings, [upstream] * len(embeddings))

    work = train if phase == "train" else infer
    sides = {}
    for name in (BASELINE, "batched"):
        model = _small_rope_model(kind)
        if name != BASELINE:
            stack.enter_context(enable("stock", rope=name, model=model))
        sides[name] = always(partial(work, model))
    return sides


def _small_rope_model(kind: str) -> Any:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = NaFlexVitCfg(
        embed_dim=HEADS * HEAD_DIM,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=0.1,
        patch_size=1,
        pos_embed="none",
        class_token=False,
        reg_tokens=0,
        rope_type=kind,
    )
    return NaFlexVit(config, in_chans=1, num_classes=0)


def patch_kernels() -> Iterator[list[Row]]:
    """768 patch kernels of 3 channels, (O, H*W*I), resampled by timm's module.

    "train": forward and backward at a size met before; "first": the forward at a new size;
    "frozen": one patch projected without gradients, with a size and a weight met before.
    """
    for (old, new), phase in product(PATCHES, ("train", "first", "frozen")):
        title = f"{old[0]}x{old[1]} to {new[0]}x{new[1]}"
        facts = dict(workload=title, phase=phase, batch=0)
        with ExitStack() as stack:
            yield time_race(facts, _patch_sides(old, new, phase, stack))


def _patch_sides(old: Grid, new: Grid, phase: str, stack: ExitStack) -> dict[str, Ready]:
    from timm.layers.patch_embed import PatchEmbedInterpolator

    weight = torch.randn(KERNELS, 3 * math.prod(old)).requires_grad_(phase == "train")
    upstream = torch.randn(KERNELS, 3 * math.prod(new))
    patch = torch.zeros(1, 1, *new, 3)

    def make_module(name: str) -> Any:
        module = PatchEmbedInterpolator(old, in_chans=3, embed_dim=KERNELS)
        if name != BASELINE:
            stack.enter_context(enable("stock", patch_embed=name, model=module))
        return module

    def ready(name: str, module: Any) -> Callable[[], None]:
        if phase == "first":
            kept.clear_all()  # our caches; a new module empties timm's
            module = make_module(name)
        compute = partial(module.resample_linear_weight, weight, new)
        if phase == "frozen":
            compute = partial(module, patch, weight, None, patch_size=new, is_linear=True)
        return partial(compute_step, compute, phase == "train", [weight], upstream)

    return {name: partial(ready, name, make_module(name)) for name in (BASELINE, "matmul")}


def other_libraries() -> Iterator[list[Row]]:
    """transformers' Siglip2 embeddings (base: a 16x16 table, 768 channels, 256 tokens): "infer",
    and "train".

    Every call has other grids, all of them met before; patches hold one value each, so that their
    projection costs little.
    """
    models = {name: _siglip2_embeddings() for name in (BASELINE, "matmul")}
    grids = WORKLOADS["siglip"].grids(64)

    def ready(model: Any, pixels: Tensor, train: bool) -> Callable[[], None]:
        compute = partial(model, pixels, torch.tensor(draw.sample(grids, len(pixels))))
        return partial(compute_step, compute, train, [*model.parameters()], upstream)

    with ExitStack() as stack:
        stack.enter_context(enable("matmul", model=models["matmul"]))
        for model in models.values():
            with torch.no_grad():
                model(torch.zeros(64, 256, 1), torch.tensor(grids))
        for batch, phase in product((1, 16, 64), ("infer", "train")):
            pixels = torch.randn(batch, 256, 1)
            upstream = torch.ones(batch, 256, WIDTH)
            draw = random.Random(batch)
            sides = {}
            for name, model in models.items():
                sides[name] = partial(ready, model, pixels, phase == "train")
            facts = dict(workload="siglip", phase=phase, batch=batch)
            yield time_race(facts, sides)


def rounding() -> Iterator[list[Row]]:
    """A row for each contender: how far autocast moves Siglip2's position embeddings of 64 images.

    Largest difference from those in float32, relative to the table's largest number. Patches are 0,
    and the table holds normal numbers.
    """
    embeddings = _siglip2_embeddings()
    torch.nn.init.zeros_(embeddings.patch_embedding.bias)
    seeded = torch.Generator().manual_seed(0)
    table = torch.nn.init.normal_(embeddings.position_embedding.weight, generator=seeded)
    inputs = (torch.zeros(64, 256, 1), torch.tensor(WORKLOADS["siglip"].grids(64)))
    contender: Any
    for contender in (BASELINE, "interpolate_cached", "matmul"):
        with torch.no_grad(), enable(contender, library="transformers"):
            want = embeddings(*inputs)
            with torch.autocast("cpu", torch.bfloat16):
                got = embeddings(*inputs)
        off = (got - want).abs().max() / table.abs().max()
        yield [{"contender": contender, "autocast": off.item()}]


def _siglip2_embeddings() -> Any:
    import transformers
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    config = transformers.Siglip2VisionConfig(hidden_size=WIDTH, num_patches=256)
    embeddings = Siglip2VisionEmbeddings(config)
    embeddings.patch_embedding = torch.nn.Linear(1, WIDTH)
    return embeddings
