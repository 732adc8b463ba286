"""Races that ``naflex-fast bench`` does not run: rotary embeddings, patch kernels, transformers'
Siglip2, exports.

Each function here yields the rows of race after race, for benchmarks/measure.py; ``tiny`` only
shows that they run.
"""

import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from timm_naflex_fast import disable, enable
from timm_naflex_fast.measure import export
from timm_naflex_fast.measure.bench import pos_embed
from timm_naflex_fast.measure.bench.model import random_batch
from timm_naflex_fast.measure.bench.race import BASELINE, Race, Timed, run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, Workload, coordinates, siglip_grids
from timm_naflex_fast.measure.models import load_model

HEADS, HEAD_DIM, DEPTH = 6, 64, 2
GRIDS = [(h, w) for h in range(4, 129) for w in range(4, 129) if h * w <= 1024]
random.Random(0).shuffle(GRIDS)
PATCHES = (((32, 32), (16, 16)), ((16, 16), (32, 32)), ((16, 16), (8, 8)), ((16, 16), (14, 20)))


class Unseen(Workload):
    """Every batch has other grids: of 2,989 none comes twice."""

    def coordinates(self, batch: int) -> Iterator[Tensor]:
        """Coordinates (B, 1024, 2) of batch after batch."""
        for first in range(0, len(GRIDS) - batch, batch):
            yield coordinates(GRIDS[first : first + batch], self.length)


class Dropped(Workload):
    """Of each image a quarter of its tokens is left, in random order; the last one, which tells the
    grid, first."""

    def coordinates(self, batch: int) -> Iterator[Tensor]:
        """The same coordinates (B, N, 2) each time."""
        grids, source = self.grids(batch), random.Random(0)
        kept = [
            [h * w - 1, *source.sample(range(h * w - 1), math.ceil(h * w / 4) - 1)]
            for h, w in grids
        ]
        cells = [image[tokens] for image, tokens in zip(coordinates(grids), kept)]
        return repeat(pad_sequence(cells, batch_first=True))


def unseen(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The position embedding of grids that never came before, padded to 1,024 tokens; and of images
    with lost tokens.

    As many rounds as there are grids for: a batch for each contender in each round, warm-ups too,
    and two for x and g.
    """
    new = Unseen(
        "unseen", (16, 16), "bilinear", lambda source, _: source.choice(GRIDS), length=1024
    )
    dropped = Dropped("dropped", (16, 16), "bilinear", siglip_grids(256))
    names, phases, batches = (
        [BASELINE, "interpolate_cached", "matmul"],
        ("infer", "train"),
        {1: 200, 16: 60, 64: 13},
    )
    for (batch, rounds), work, phase in product(batches.items(), (new, dropped), phases):
        with ExitStack() as stack:
            race = pos_embed.race(
                work,
                1 if tiny else batch,
                "float32",
                phase,
                names,
                stack,
                "cpu",
                4 if tiny else 192,
            )
            yield run(race, 1 if tiny else rounds, budget=0.01 if tiny else 2.0)


def time_race(race: Race, budget: float, tiny: bool) -> list[dict[str, Any]]:
    """The rows of a race."""
    return run(race, 1 if tiny else 30, budget=0.01 if tiny else budget)


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


def rope(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """timm's ``NaFlexVit._generate_rope_naflex`` alone, on ``diverse`` grids.

    "infer" makes the embeddings, mixed ones block by block, each dropped before the next. "train",
    of mixed ones alone, keeps all blocks' and computes the gradient of the frequencies.
    """
    phases = (("axial", "infer"), ("mixed", "infer"), ("mixed", "train"))
    for (kind, phase), batch in product(phases, (1,) if tiny else (1, 64)):
        with ExitStack() as stack:
            yield time_race(_rope_race(kind, phase, batch, stack), 0.5, tiny)


def _rope_race(kind: str, phase: str, batch: int, stack: ExitStack) -> Race:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    coord = coordinates(WORKLOADS["diverse"].grids(batch))
    x = torch.zeros(()).expand(*coord.shape[:2], HEADS * HEAD_DIM)  # only its shape and dtype count
    g = torch.randn(batch, HEADS, coord.shape[1], 2 * HEAD_DIM)

    def infer(model: Any) -> None:
        with torch.no_grad():
            embeddings = model._generate_rope_naflex(x, coord)
            for block in [embeddings] if isinstance(embeddings, Tensor) else embeddings:
                del block

    def train(model: Any) -> None:
        model.rope.freqs.grad = None
        embeddings = list(model._generate_rope_naflex(x, coord))
        torch.autograd.backward(embeddings, [g] * len(embeddings))

    def contender(name: str) -> Timed:
        small: dict[str, Any] = dict(
            embed_dim=HEADS * HEAD_DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=0.1
        )
        small |= dict(
            patch_size=1, pos_embed="none", class_token=False, reg_tokens=0, rope_type=kind
        )
        model = NaFlexVit(NaFlexVitCfg(**small), in_chans=1, num_classes=0)
        if name == "batched":
            stack.enter_context(enable("stock", rope=name, model=model))
        return Timed(name, train if phase == "train" else infer, lambda: model)

    return Race("rope", kind, phase, batch, "float32", (contender(BASELINE), contender("batched")))


def patch_kernels(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """Patch kernels of 3 channels, linear (O, H*W*I) and conv (O, I, H, W), resampled by timm's
    module.

    "train": forward and backward at a size met before; "first": the forward at a new size;
    "frozen": one patch projected without gradients, with a size and a weight met before.
    """
    for (old, new), layout, phase in product(
        PATCHES, ("linear", "conv"), ("train", "first", "frozen")
    ):
        with ExitStack() as stack:
            yield time_race(
                _patch_race(old, new, layout, phase, 2 if tiny else 768, stack), 0.5, tiny
            )


def _patch_race(
    old: Any, new: Any, layout: str, phase: str, kernels: int, stack: ExitStack
) -> Race:
    from timm.layers.patch_embed import PatchEmbedInterpolator

    linear = layout == "linear"
    shape, wanted = (((h * w * 3,) if linear else (3, h, w)) for h, w in (old, new))
    weight = torch.randn(kernels, *shape).requires_grad_(phase == "train")
    upstream = torch.randn(kernels, *wanted)
    patch = torch.zeros((1, 1, *new, 3) if linear else (1, 3, *new))

    def prepare(name: str, known: Any) -> Callable[[], Tensor]:
        stack.close()
        if phase == "first":
            disable()  # empties our caches; a new module empties timm's
        if name != BASELINE:
            stack.enter_context(enable("stock", patch_embed=name))
        module = (
            PatchEmbedInterpolator(old, in_chans=3, embed_dim=kernels)
            if phase == "first"
            else known
        )
        if phase == "frozen":
            return partial(module, patch, weight, None, patch_size=new, is_linear=linear)
        return partial(
            module.resample_linear_weight if linear else module.resample_conv_weight, weight, new
        )

    modules = {
        name: PatchEmbedInterpolator(old, in_chans=3, embed_dim=kernels)
        for name in (BASELINE, "matmul")
    }
    work = partial(compute_step, train=phase == "train", leaves=[weight], upstream=upstream)
    contenders = tuple(
        Timed(name, work, partial(prepare, name, module)) for name, module in modules.items()
    )
    title = f"{old[0]}x{old[1]} to {new[0]}x{new[1]} {layout}"
    return Race("patch_embed", title, phase, 0, "float32", contenders)


def other_libraries(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """transformers' Siglip2 embeddings (base: a 16x16 table, 768 channels, 256 tokens): "infer",
    and "train".

    Every call has other grids, all of them met before; patches hold one value each, so that their
    projection costs little.
    """
    import transformers
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    width = 8 if tiny else 768
    embeddings = Siglip2VisionEmbeddings(
        transformers.Siglip2VisionConfig(hidden_size=width, num_patches=256)
    )
    embeddings.patch_embedding = torch.nn.Linear(1, width)
    models: dict[Any, Any] = {
        name: copy.deepcopy(embeddings) for name in (BASELINE, "interpolate_cached", "matmul")
    }
    grids = WORKLOADS["siglip"].grids(64)

    def prepare(model: Any, pixels: Tensor, draw: random.Random) -> Callable[[], Tensor]:
        return partial(model, pixels, torch.tensor(draw.sample(grids, len(pixels))))

    with ExitStack() as stack:
        for name, model in models.items():
            if name != BASELINE:
                stack.enter_context(enable(name, model=model))
            with torch.no_grad():
                model(torch.zeros(64, 256, 1), torch.tensor(grids))
        for batch, phase in product((1,) if tiny else (1, 16, 64), ("infer", "train")):
            pixels, draw, upstream = (
                torch.randn(batch, 256, 1),
                random.Random(batch),
                torch.ones(batch, 256, width),
            )
            contenders = []
            for name, model in models.items():
                work = partial(
                    compute_step,
                    train=phase == "train",
                    leaves=[*model.parameters()],
                    upstream=upstream,
                )
                contenders.append(Timed(name, work, partial(prepare, model, pixels, draw)))
            yield time_race(
                Race("transformers", "siglip", phase, batch, "float32", tuple(contenders)),
                2.0,
                tiny,
            )


class Embeddings(export.Naflex):
    """The embeddings of a NaFlexVit alone."""

    def forward(self, patches: Tensor, patch_coord: Tensor, patch_valid: Tensor) -> Tensor:
        """The tokens (B, N, C)."""
        return self.model.get_submodule("embeds")(patches, patch_coord, patch_valid)[0]


def exported(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """A ViT-S's embeddings, and the whole of it, exported, in each runtime: 8 images of other
    grids, padded to 256.

    Beside timm's loop and timm's grid_sample in PyTorch.
    """
    size: dict[str, Any] = dict(depth=1, embed_dim=64, num_heads=2) if tiny else {}
    model, _ = load_model("vit_small_patch16_224", random_weights=True, **size)
    flagged = copy.deepcopy(model)
    flagged.embeds.pos_embed_use_grid_sample = True
    _, example, _, free = export.batches(model, None)
    inputs = random_batch(model, WORKLOADS["siglip"].grids(8), 256)
    for part, wrap in {"embeddings": Embeddings, "whole model": export.Naflex}.items():
        module, sampled = wrap(model).eval(), wrap(flagged).eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.onnx")
            with enable("matmul", model=model):
                program = export.write(module, example, free, file)
            eager = {BASELINE: module, "timm-flag-bicubic": sampled}
            runs: dict[str, Any] = {
                name: lambda batch, run=run: run(**batch) for name, run in eager.items()
            }
            runs |= {name: load(file, program) for name, load in export.LOADERS.items()}
            contenders = tuple(Timed(name, run, lambda: inputs) for name, run in runs.items())
            yield time_race(
                Race("exported", "siglip", "infer", 8, "float32", contenders, {"part": part}),
                10.0,
                tiny,
            )
