"""Races of rotary embeddings, patch kernels, transformers' Siglip2 and exports.

Each function here yields the rows of race after race, for measure.py; ``tiny`` only shows that they
run. pos_embed.py has those of the position embedding.
"""

import copy
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.benchmarks.pos_embed import WORKLOADS
from lab.benchmarks.rows import Row, always, time_race
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import export
from timm_naflex_fast.commands.measure.bench.model import random_batch
from timm_naflex_fast.commands.measure.bench.workloads import coordinates
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.racing import Ready
from timm_naflex_fast.pos_embed import kept

HEADS = 6
HEAD_DIM = 64
DEPTH = 2
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


def rope(tiny: bool) -> Iterator[list[Row]]:
    """timm's ``NaFlexVit._generate_rope_naflex`` alone, on ``diverse`` grids.

    "infer" makes the embeddings, mixed ones block by block, each dropped before the next. "train",
    of mixed ones alone, keeps all blocks' and computes the gradient of the frequencies.
    """
    batches = [1, 64]
    if tiny:
        batches = [1]
    cases = (("axial", "infer"), ("mixed", "infer"), ("mixed", "train"))
    for (kind, phase), batch in product(cases, batches):
        facts = dict(workload=kind, phase=phase, batch=batch, dtype="float32")
        with ExitStack() as stack:
            yield time_race(facts, _rope_sides(kind, phase, batch, stack), 10.0, tiny)


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

    work = infer
    if phase == "train":
        work = train
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


def patch_kernels(tiny: bool) -> Iterator[list[Row]]:
    """Patch kernels of 3 channels, linear (O, H*W*I) and conv (O, I, H, W), resampled by timm's
    module.

    "train": forward and backward at a size met before; "first": the forward at a new size;
    "frozen": one patch projected without gradients, with a size and a weight met before.
    """
    kernels = 768
    if tiny:
        kernels = 2
    phases = ("train", "first", "frozen")
    for (old, new), layout, phase in product(PATCHES, ("linear", "conv"), phases):
        title = f"{old[0]}x{old[1]} to {new[0]}x{new[1]} {layout}"
        facts = dict(workload=title, phase=phase, batch=0, dtype="float32")
        with ExitStack() as stack:
            sides = _patch_sides(old, new, layout, phase, kernels, stack)
            yield time_race(facts, sides, 2.0, tiny)


def _patch_sides(
    old: Any, new: Any, layout: str, phase: str, kernels: int, stack: ExitStack
) -> dict[str, Ready]:
    from timm.layers.patch_embed import PatchEmbedInterpolator

    linear = layout == "linear"

    def shape_of(h: int, w: int) -> tuple[int, ...]:
        if linear:
            return kernels, h * w * 3
        return kernels, 3, h, w

    weight = torch.randn(shape_of(*old)).requires_grad_(phase == "train")
    upstream = torch.randn(shape_of(*new))
    patch = torch.zeros((1, 1, *new, 3) if linear else (1, 3, *new))

    def make_module(name: str) -> Any:
        module = PatchEmbedInterpolator(old, in_chans=3, embed_dim=kernels)
        if name != BASELINE:
            stack.enter_context(enable("stock", patch_embed=name, model=module))
        return module

    def ready(name: str, module: Any) -> Callable[[], None]:
        if phase == "first":
            kept.clear_all()  # our caches; a new module empties timm's
            module = make_module(name)
        compute = module.resample_linear_weight if linear else module.resample_conv_weight
        compute = partial(compute, weight, new)
        if phase == "frozen":
            compute = partial(module, patch, weight, None, patch_size=new, is_linear=linear)
        return partial(compute_step, compute, phase == "train", [weight], upstream)

    return {name: partial(ready, name, make_module(name)) for name in (BASELINE, "matmul")}


def other_libraries(tiny: bool) -> Iterator[list[Row]]:
    """transformers' Siglip2 embeddings (base: a 16x16 table, 768 channels, 256 tokens): "infer",
    and "train".

    Every call has other grids, all of them met before; patches hold one value each, so that their
    projection costs little.
    """
    width = 768
    batches = [1, 16, 64]
    if tiny:
        width = 8
        batches = [1]
    embeddings = _siglip2_embeddings(width)
    models: dict[Any, Any] = {name: copy.deepcopy(embeddings) for name in (BASELINE, "matmul")}
    grids = WORKLOADS["siglip"].grids(64)

    def ready(model: Any, pixels: Tensor, train: bool) -> Callable[[], None]:
        compute = partial(model, pixels, torch.tensor(draw.sample(grids, len(pixels))))
        return partial(compute_step, compute, train, [*model.parameters()], upstream)

    with ExitStack() as stack:
        for name, model in models.items():
            if name != BASELINE:
                stack.enter_context(enable(name, model=model))
            with torch.no_grad():
                model(torch.zeros(64, 256, 1), torch.tensor(grids))
        for batch, phase in product(batches, ("infer", "train")):
            pixels = torch.randn(batch, 256, 1)
            upstream = torch.ones(batch, 256, width)
            draw = random.Random(batch)
            sides = {}
            for name, model in models.items():
                sides[name] = partial(ready, model, pixels, phase == "train")
            facts = dict(workload="siglip", phase=phase, batch=batch, dtype="float32")
            yield time_race(facts, sides, 10.0, tiny)


def _siglip2_embeddings(width: int) -> Any:
    import transformers
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    config = transformers.Siglip2VisionConfig(hidden_size=width, num_patches=256)
    embeddings = Siglip2VisionEmbeddings(config)
    embeddings.patch_embedding = torch.nn.Linear(1, width)
    return embeddings


EXPORTED = (
    ("embeddings", "siglip", 8),
    ("embeddings", "siglip", 64),
    ("embeddings", "diverse", 8),
    ("whole model", "siglip", 8),
)


def exported(tiny: bool) -> Iterator[list[Row]]:
    """A ViT-S's embeddings, and the whole of it, exported, in each runtime, on other grids than
    those of the export.

    Beside timm's loop and timm's grid_sample in PyTorch.
    """
    small: dict[str, Any] = dict(depth=1, embed_dim=64, num_heads=2) if tiny else {}
    model, _ = load_model("vit_small_patch16_224", random_weights=True, **small)
    for part, workload, batch in EXPORTED:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            sides = _exported_sides(model, part, workload, batch, Path(folder))
            facts = dict(workload=workload, phase="infer", batch=batch, dtype="float32")
            yield time_race({**facts, "about": {"part": part}}, sides, 60.0, tiny)


def _exported_sides(
    model: Any, part: str, workload: str, batch: int, folder: Path
) -> dict[str, Ready]:
    grids = WORKLOADS[workload].grids(batch)
    inputs = random_batch(model, grids, max(h * w for h, w in grids))
    flagged = copy.deepcopy(model)
    flagged.embeds.pos_embed_use_grid_sample = True
    batches, free = export.make_inputs(model, size=None)
    if part == "embeddings":
        model = model.embeds
        flagged = flagged.embeds
    module = export.Naflex(model).eval()
    file = folder / "model.onnx"
    with enable("matmul", model=model):
        program = export.write(module, batches[0], free, file)

    runs: dict[str, Callable[[Any], Any]] = {
        BASELINE: partial(_call, module),
        "timm-flag-bicubic": partial(_call, export.Naflex(flagged).eval()),
        "AOTInductor": _aot_inductor(program, folder),
    }
    for name, load in export.LOADERS.items():
        runs[name] = load(file, program)[export.FLOAT32]
    return {name: always(partial(run, inputs)) for name, run in runs.items()}


def _aot_inductor(program: Any, folder: Path) -> Callable[[Any], Any]:
    """The program as AOTInductor compiles it."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    package = aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return partial(_call, aoti_load_package(package))


def _call(module: Any, inputs: dict[str, Tensor]) -> Any:
    return module(**inputs)
