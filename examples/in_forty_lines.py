"""timm's loop over grids as one function of 40 lines, which could live in timm behind a flag.

It adds what timm's loop adds (antialiased, within rounding), compiles into one graph, and exports.

    uv run examples/in_forty_lines.py
    uv run examples/in_forty_lines.py --json lab/results/in_timm.json   # what docs/in-timm.md shows
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor

import timm_naflex_fast
from timm_naflex_fast.commands.measure.bench.workloads import coordinates
from timm_naflex_fast.commands.measure.output import check_writable, positive, provenance, to_json

Row = dict[str, Any]
LOOP = "timm's loop"
OURS = "this package"
CONTENDERS = (LOOP, "timm's flag", "forty lines", OURS)
WARM_UP = 3  # rounds: then what is kept of a frozen table is there
GRIDS = [(16, 16), (9, 28), (25, 10), (5, 50), (12, 20), (1, 200), (200, 1), (30, 8)]


def add_pos_embed(
    x: Tensor, table: Tensor, patch_coord: Tensor, bicubic: bool, ar_preserving: bool = False
) -> None:
    """Add the table (1, H0, W0, C), resized to each image's grid, to the tokens x (B, N, C)."""
    grid = patch_coord.amax(1, keepdim=True) + 1  # (B, 1, 2): h, w
    has_cell = torch.arange(x.shape[1], device=x.device) < grid.prod(2)  # (B, N); not padding
    size = grid
    if ar_preserving:
        size = grid.amax(2, keepdim=True).expand_as(grid)

    def weights(axis: int) -> Tensor:  # of the table's lines along an axis, (B, N, n0)
        n0 = table.shape[1 + axis]
        scale = n0 / size[..., axis, None]
        middle = (patch_coord[..., axis, None] + 0.5) * scale
        lines = torch.arange(n0, device=x.device) + 0.5
        # Antialiased: a table that is made smaller is read with a kernel that is wider.
        distance = (lines - middle).abs() / scale.clamp(min=1)
        if bicubic:  # Keys' kernel with the coefficient -0.5
            near = (1.5 * distance - 2.5) * distance * distance + 1
            far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
            kernel = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
        else:
            kernel = (1 - distance).clamp(min=0)
        return kernel / kernel.sum(-1, keepdim=True)  # at the border, what lies outside is left out

    with torch.autocast(x.device.type, enabled=False):
        along_y = weights(0) * has_cell[..., None]
        both = along_y[..., :, None] * weights(1)[..., None, :]  # (B, N, H0, W0)
        embeddings = both.flatten(2) @ table.float().flatten(0, 2)  # (B, N, C)
    x.add_(embeddings.to(x.dtype))


class Module(torch.nn.Module):
    """The same as a module, to compile and export: it takes x and coordinates, returns the sum."""

    def __init__(self, table: Tensor, bicubic: bool) -> None:
        super().__init__()
        self.table = table
        self.bicubic = bicubic

    def forward(self, x: Tensor, patch_coord: Tensor) -> Tensor:
        """X with its position embeddings."""
        x = x * 1  # no input of a graph may be written to
        add_pos_embed(x, self.table, patch_coord, self.bicubic)
        return x


def make_embeds(interpolation: str) -> NaFlexEmbeds:
    """timm's embeddings with a learned table of 16 x 16 cells and 768 channels."""
    embeds = NaFlexEmbeds(
        patch_size=16,
        embed_dim=768,
        proj_type="linear",
        class_token=False,
        pos_embed_grid_size=(16, 16),
        pos_embed_interp_mode=interpolation,
    )
    torch.nn.init.normal_(embeds.pos_embed, generator=torch.Generator().manual_seed(0))
    return embeds


class Step:
    """One step by each contender: to add the embeddings; in training, their gradients too."""

    def __init__(self, interpolation: str, batch: int) -> None:
        self.embeds = make_embeds(interpolation)
        self.is_bicubic = interpolation == "bicubic"
        self.coord = coordinates([GRIDS[i % len(GRIDS)] for i in range(batch)])  # (B, N, 2)
        shape = (*self.coord.shape[:2], 768)
        self.tokens = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        grid = self.coord.amax(1, keepdim=True) + 1
        self.has_cell = torch.arange(shape[1]) < grid.prod(2)  # (B, N)

    def add(self, contender: str, x: Tensor) -> None:
        """Add by one contender."""
        if contender == "forty lines":
            add_pos_embed(x, self.embeds.pos_embed, self.coord, self.is_bicubic)
        elif contender == "timm's flag":
            self.embeds._apply_learned_naflex_pos_embed_grid_sample(x, self.coord)
        else:
            self.embeds._apply_learned_naflex_pos_embed(x, self.coord)

    def run(self, contender: str, trains: bool) -> tuple[float, Tensor]:
        """Milliseconds, and the tokens (T, 768) that have a cell."""
        ours = nullcontext() if contender != OURS else timm_naflex_fast.enable()
        with ours, torch.set_grad_enabled(trains):
            x = self.tokens.clone().requires_grad_(trains) * 1
            start = time.perf_counter()
            self.add(contender, x)
            if trains:
                self.embeds.pos_embed.grad = None
                x.backward(self.upstream)
            return 1e3 * (time.perf_counter() - start), x.detach()[self.has_cell]


def measure(batch: int, rounds: int) -> list[Row]:
    """The shortest times in turns, and the largest difference from timm's loop."""
    steps = {name: Step(name, batch) for name in ("bilinear", "bicubic")}
    rows = []
    for phase in ("train", "infer"):
        cases = list(product(steps, CONTENDERS))
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        results = {}
        for _ in range(WARM_UP + rounds):
            for interpolation, contender in cases:
                step = steps[interpolation]
                ms, results[interpolation, contender] = step.run(contender, phase == "train")
                times[interpolation, contender].append(ms)

        for interpolation, contender in cases:
            timed = times[interpolation, contender][WARM_UP:]
            off = results[interpolation, contender] - results[interpolation, LOOP]
            rows.append(
                {
                    "interpolation": interpolation,
                    "phase": phase,
                    "batch": batch,
                    "contender": contender,
                    "ms": min(timed),
                    "median_ms": statistics.median(timed),
                    "off": off.abs().max().item(),
                }
            )
    return rows


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=positive, default=64, help="images (64)")
    parser.add_argument("--rounds", type=positive, default=7, help="how often each runs (7)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.json:
        check_writable(args.json)

    start = time.perf_counter()
    rows = measure(args.batch, args.rounds)
    for row in rows:
        print(
            "{interpolation:9} {phase:6} {contender:14} {ms:8.1f} ms  off {off:.1e}".format(**row)
        )
    if args.json:
        about = provenance("uv run examples/in_forty_lines.py --json lab/results/in_timm.json")
        seconds = round(time.perf_counter() - start)
        args.json.write_text(to_json({**about, "seconds": seconds, "rows": rows}))


if __name__ == "__main__":
    main()
