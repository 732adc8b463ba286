"""Times and memory of timm's loop, the loop with each patch, timm's flag, and this package.

    uv run lab/timm/race.py        # on a GPU, if there is one
    uv run lab/timm/race.py --json lab/results/in_timm.json  # docs/in-timm.md's

One step adds position embeddings to the tokens; in training, it goes backward, too. The table
changes before every step, so that nothing that was kept helps. The peak is what a step holds
beyond what was there before: on a GPU by PyTorch's allocator, on a CPU counted. Operators, and how
often the host would wait for a GPU, are counted on both.

Never run on a GPU.
"""

import argparse
import time
from contextlib import ExitStack
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor

from lab.benchmarks.costs import counting
from lab.benchmarks.pos_embed import LEARNED, SAMPLED, WORKLOADS, Row, ready, time_race
from lab.timm.patched import load_embeds
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure.output import check_writable, positive, provenance, to_json
from timm_naflex_fast.commands.measure.racing import Ready

LOOP = "timm's loop"
OURS = "this package"
CONTENDERS = (LOOP, "ten lines", "forty lines", "timm's flag", OURS)
# Images in a batch; those of radio have up to 2,304 tokens each.
BATCHES = {"siglip": 64, "diverse": 64, "radio": 8}


def methods() -> dict[str, Any]:
    """What each contender calls to add the embeddings; this package replaces the loop."""
    loop = getattr(NaFlexEmbeds, LEARNED)
    patched = getattr(load_embeds("ten_lines"), LEARNED)
    product_of_weights = getattr(load_embeds("forty_lines"), f"{LEARNED}_matmul")
    added = (loop, patched, product_of_weights, getattr(NaFlexEmbeds, SAMPLED), None)
    return dict(zip(CONTENDERS, added))


class Work:
    """A batch, and two tables that take turns.

    Attributes:
        coord: (B, N, 2).
        x: the tokens (B, N, C).
        upstream: their gradient; None: there is no backward.
        tables: two of (1, H0, W0, C), float32.
    """

    def __init__(
        self, workload: str, phase: str, batch: int, channels: int, dtype: torch.dtype
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        source = torch.Generator().manual_seed(0)
        self.workload = WORKLOADS[workload]
        self.channels = channels
        self.coord = self.workload.coordinates(batch).to(device)
        shape = (*self.coord.shape[:2], channels)
        self.x = torch.randn(shape, generator=source).to(device, dtype)
        self.upstream = None
        if phase == "train":
            self.upstream = torch.randn(shape, generator=source).to(device, dtype)
        table = (1, *self.workload.table, channels)
        self.tables = [torch.randn(table, generator=source).to(device) for _ in range(2)]

    def embeds(self, method: Any, stack: ExitStack) -> NaFlexEmbeds:
        """timm's module with a contender's method, until ``stack`` is closed."""
        embeds = self.workload.embeds(self.channels).to(self.coord.device)
        if method is None:
            stack.enter_context(enable("matmul", model=embeds))
        else:
            setattr(embeds, LEARNED, method.__get__(embeds))
        return embeds

    def step(self, embeds: NaFlexEmbeds) -> Ready:
        """A contender's step."""
        return partial(ready, embeds, self.x, self.coord, self.upstream, cycle(self.tables))

    def results(self, embeds: NaFlexEmbeds) -> list[Tensor]:
        """What a contender adds, and the table's gradient, if there is a backward."""
        table = embeds.pos_embed
        table.data.copy_(self.tables[0])
        with torch.set_grad_enabled(self.upstream is not None):
            added = torch.zeros_like(self.x)
            getattr(embeds, LEARNED)(added, self.coord)
        if self.upstream is None:
            return [added]
        return [added.detach(), *torch.autograd.grad(added, table, self.upstream)]


def costs_of(step: Ready) -> Row:
    """The peak of a step in bytes, its operators, and how often the host waits."""
    work = step()
    with counting() as count:
        work()
    costs = {name: count[name] for name in ("peak", "operators", "host_waits")}
    if torch.cuda.is_available():
        work = step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        costs["peak"] = torch.cuda.max_memory_allocated() - before
    return costs


def measure(
    workload: str, phase: str, batch: int, channels: int, dtype: torch.dtype, rounds: int
) -> list[Row]:
    """A row for each contender: its times, its costs, and how far it is from timm's loop."""
    work = Work(workload, phase, batch, channels, dtype)
    with ExitStack() as stack:
        embeds = {}
        steps = {}
        for name, method in methods().items():
            embeds[name] = work.embeds(method, stack)
            steps[name] = work.step(embeds[name])
        kind = str(dtype).removeprefix("torch.")
        facts = dict(workload=workload, phase=phase, batch=batch, dtype=kind, channels=channels)
        rows = time_race(facts, steps, rounds)

        wants = work.results(embeds[LOOP])
        for row in rows:
            name = row["contender"]
            results = work.results(embeds[name])
            row |= costs_of(steps[name])
            row["bits"] = all(map(torch.equal, results, wants))
            row["off"] = (results[0] - wants[0]).abs().max().item()
    return rows


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=positive, help=f"images ({BATCHES})")
    parser.add_argument("--channels", type=positive, default=768, help="of a token (768)")
    kinds = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=kinds, default=kinds[0], help="of tokens (float32)")
    parser.add_argument("--rounds", type=positive, default=10, help="of each race (10)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.json:
        check_writable(args.json)

    start = time.perf_counter()
    dtype = getattr(torch, args.dtype)
    rows = []
    for workload, phase in product(BATCHES, ("train", "infer")):
        batch = args.batch or BATCHES[workload]
        for row in measure(workload, phase, batch, args.channels, dtype, args.rounds):
            rows.append(row)
            print(
                "{workload:8}{phase:6}{contender:13}{median_ms:9.2f} ms{operators:5} operators"
                "{host_waits:5} waits".format(**row),
                f"{row['peak'] / 1e6:8.1f} MB  off {row['off']:.1e}{', equal bits' * row['bits']}",
                flush=True,
            )
    if args.json:
        about = provenance("uv run lab/timm/race.py --json lab/results/in_timm.json")
        about["seconds"] = round(time.perf_counter() - start)
        args.json.write_text(to_json({**about, "rows": rows}))


if __name__ == "__main__":
    main()
