"""Resampling of patch kernels: this package, timm, and the vmap form of timm issue 2514.

uv run benchmarks/patch_kernels.py --json results/patch_kernels.json

| phase | what is timed |
| --- | --- |
| train | forward and backward at a size met before |
| first | the forward at a size that was not met before |
| frozen | projecting one patch without gradients, with a size and a weight met before |
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import timm_naflex_fast
from timm_naflex_fast.measure.bench.race import BASELINE, PLAIN_ADD, Contender, Race, print_race, run
from timm_naflex_fast.measure.output import check_writable, write_json
from timm_naflex_fast.measure.provenance import provenance

Size = tuple[int, int]

SIZES: tuple[tuple[Size, Size], ...] = (
    ((32, 32), (16, 16)),
    ((16, 16), (32, 32)),
    ((16, 16), (48, 48)),
    ((16, 16), (12, 12)),
    ((16, 16), (8, 8)),
    ((16, 16), (14, 20)),
)
LAYOUTS = ("linear", "conv")  # (O, H*W*I), as NaFlexVit's weights are, and (O, I, H, W)
PHASES = ("train", "first", "frozen")
IN_CHANS = 3
VMAP = "issue-2514-vmap"


def vmap_form(weight: Tensor, inverse: Tensor, old: Size, new: Size, linear: bool) -> Tensor:
    """One product with ``inverse``, pinv(R^T) (h*w, H*W), per kernel, vectorised with vmap: timm before PR 2518."""
    kernels = weight.view(len(weight), *old, IN_CHANS).permute(0, 3, 1, 2) if linear else weight
    out = torch.vmap(torch.vmap(lambda kernel: (inverse @ kernel.reshape(-1)).reshape(new)))(kernels)
    return out.permute(0, 2, 3, 1).flatten(1) if linear else out


def inverse_2d(old: Size, new: Size) -> Tensor:
    """pinv(R^T) (h*w, H*W), by one SVD."""
    basis = torch.eye(old[0] * old[1]).reshape(-1, 1, *old)
    resized = torch.nn.functional.interpolate(basis, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.linalg.pinv(resized.flatten(1))


def race(old: Size, new: Size, layout: str, phase: str, kernels: int, on: ExitStack) -> Race:
    """The race of one pair of sizes, on float32 weights of ``kernels`` x 3 channels; ``on`` holds our choice."""
    from timm.layers.patch_embed import PatchEmbedInterpolator

    linear, generator = layout == "linear", torch.Generator().manual_seed(0)
    shape = (kernels, old[0] * old[1] * IN_CHANS) if linear else (kernels, IN_CHANS, *old)
    weight = torch.randn(shape, generator=generator).requires_grad_(phase == "train")
    upstream = torch.randn((kernels, new[0] * new[1] * IN_CHANS) if linear else (kernels, IN_CHANS, *new))

    def interpolator() -> Any:
        return PatchEmbedInterpolator(old, in_chans=IN_CHANS, embed_dim=kernels)

    def prepare(name: str, known: Any) -> Callable[[], Tensor]:
        """timm's own module, patched for our contender; in the phase "first" nothing is known to either."""
        on.close()
        if phase == "first":
            timm_naflex_fast.disable()  # empties our caches
        if name == "matmul":
            on.enter_context(timm_naflex_fast.enable("stock", patch_embed="matmul"))
        module = interpolator() if phase == "first" else known
        if phase == "frozen":
            patch = torch.zeros((1, 1, *new, IN_CHANS) if linear else (1, IN_CHANS, *new))
            return partial(module, patch, weight, None, patch_size=new, is_linear=linear)
        return partial(module.resample_linear_weight if linear else module.resample_conv_weight, weight, new)

    def step(resample: Callable[[], Tensor]) -> None:
        if phase != "train":
            with torch.no_grad():
                resample()
            return
        weight.grad = None
        resample().backward(upstream)

    def touch(_: None) -> None:
        """The least that any form reads and writes: the weight read, the result written; and their gradients."""
        weight.detach().sum()
        torch.empty_like(upstream).zero_()
        if phase == "train":
            upstream.sum()
            torch.empty_like(weight).detach().zero_()

    made = [Contender(name, step, partial(prepare, name, interpolator())) for name in (BASELINE, "matmul")]
    made[1] = Contender("matmul", step, made[1].prepare, ours=True)
    if phase == "train":
        form = partial(vmap_form, weight, inverse_2d(old, new), old, new, linear)
        made.append(Contender(VMAP, step, lambda: form))
    made.append(Contender(PLAIN_ADD, touch))
    sizes = ["x".join(map(str, size)) for size in (old, new)]
    about = {"layout": layout, "old": sizes[0], "new": sizes[1]}
    name = f"{sizes[0]}->{sizes[1]} {layout}"
    return Race("patch_embed", name, phase, 0, "float32", tuple(made), about)


def main() -> None:
    """Run every race, print its table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--kernels", type=int, default=768, help="output channels (768)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per contender and race, at least 3 rounds")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    check_writable(options.json)
    rows = []
    for (old, new), layout, phase in product(SIZES, LAYOUTS, options.phase):
        with ExitStack() as on:
            made = race(old, new, layout, phase, options.kernels, on)
            found = run(made, options.rounds, budget=options.budget)
        print_race(made.title, found)
        rows += found
    if options.json:
        command = shlex.join(["uv", "run", "benchmarks/patch_kernels.py", *sys.argv[1:]])
        write_json(options.json, {**provenance(command), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
