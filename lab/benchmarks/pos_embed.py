"""Races of the position embedding alone, forward, or forward and backward.

| phase | gradient | the table |
| --- | --- | --- |
| infer | no | changes before every call, so that nothing kept from the last one helps |
| frozen | no | is the same on every call |
| train | of the table and of ``x`` | changes before every call, as an optimizer changes it |
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor

from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure.bench.workloads import (
    Draw,
    Grid,
    coordinates,
    siglip_grids,
)
from timm_naflex_fast.commands.measure.racing import Ready, race
from timm_naflex_fast.names import BASELINE, STRATEGY_NAMES
from timm_naflex_fast.pos_embed import kept

LEARNED = "_apply_learned_naflex_pos_embed"
SAMPLED = "_apply_learned_naflex_pos_embed_grid_sample"
OWN = dict(vars(NaFlexEmbeds))  # timm's methods, before any is replaced
PLAIN_ADD = "plain-add"
"""Adds ready numbers to the tokens: it shows what touching the memory costs."""

BATCH = 64
PHASES = ("infer", "frozen", "train")
FLAG = "timm-flag-bilinear"  # timm's own flag, with this filter
NAMES = (BASELINE, FLAG, "matmul", PLAIN_ADD)


ROUNDS = 30  # of a race
NO_OPTIONS: Mapping[str, Any] = {}
Row = dict[str, Any]


def time_race(facts: Row, sides: Mapping[str, Ready], rounds: int = ROUNDS) -> list[Row]:
    """A race as the rows of a result file: for each side, ``facts`` and its figures.

    Args:
        facts: what the race is: "workload", "phase", "batch", and "about", further ones.
        sides: as ``race`` takes them.
        rounds: of the race.
    """
    found = race(sides, rounds)
    return [{**facts, "contender": name, **figures} for name, figures in found.items()]


def always(work: Callable[[], Any]) -> Ready:
    """A side that needs no readying."""
    return lambda: work


class Workload(NamedTuple):
    """Batches of grids, and the table that is resampled to them.

    Attributes:
        name: in tables.
        draw: an image's grid (h, w), by a random generator.
        table: its size (H0, W0).
        mode: "bilinear" or "bicubic".
        options: further ones of timm's NaFlexEmbeds.
    """

    name: str
    draw: Draw
    table: Grid
    mode: str = "bilinear"
    options: Mapping[str, Any] = NO_OPTIONS

    def grids(self, batch: int) -> list[Grid]:
        """The grids of a batch, always the same ones; a smaller batch begins a larger one."""
        source = random.Random(f"{self.name} 0")
        return [self.draw(source) for _ in range(batch)]

    def coordinates(self, batch: int) -> Tensor:
        """Of the grids of a batch, (B, N, 2)."""
        return coordinates(self.grids(batch))

    def embeds(self, channels: int) -> NaFlexEmbeds:
        """timm's NaFlexEmbeds with this table (and a projection that is not used)."""
        embeds = NaFlexEmbeds(
            1,
            1,
            channels,
            class_token=False,
            proj_type="linear",
            pos_embed="learned",
            pos_embed_grid_size=self.table,
            pos_embed_interp_mode=self.mode,
            **self.options,
        )
        torch.nn.init.normal_(embeds.pos_embed, generator=torch.Generator().manual_seed(0))
        return embeds


def _uniform(low: int, high: int) -> Draw:
    return lambda source: (source.randint(low, high), source.randint(low, high))


_RADIO = dict(pos_embed_antialias=False, pos_embed_align_corners=True, pos_embed_ar_preserving=True)
_ALL = (
    Workload("siglip", siglip_grids(256), (16, 16)),
    Workload("diverse", _uniform(4, 31), (32, 32), "bicubic"),  # of timm's issue 2514
    Workload("radio", _uniform(16, 48), (128, 128), options=_RADIO),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
SHOWN = ("siglip", "diverse")


class _Activation(torch.autograd.Function):
    """``x`` as the output of an earlier layer, which takes its gradient and does nothing with it.

    PyTorch would copy the gradient of a leaf into ``.grad``, which is no part of the step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def activation(x: Tensor) -> Tensor:
    """Tokens in the memory of ``x`` that take a gradient."""
    return _Activation.apply(x.detach(), torch.zeros((), requires_grad=True))


def served(name: Any, embeds: Any) -> AbstractContextManager[Any]:
    """Inside, ``embeds._apply_learned_naflex_pos_embed`` computes as the contender does.

    timm's own code is called directly: the way to it through a replaced method is not timed.
    """
    if name in STRATEGY_NAMES:
        return enable("stock", pos_embed=name, model=embeds)
    method = LEARNED
    if name == FLAG:
        method = SAMPLED
        embeds.pos_embed_interp_mode = "bilinear"
    setattr(embeds, LEARNED, OWN[method].__get__(embeds))
    return nullcontext()


def call(embeds: Any, x: Tensor, coord: Tensor, upstream: Tensor | None) -> None:
    """Add the embeddings into ``x`` (B, N, C); with ``upstream``, its gradient, go backward too."""
    with torch.set_grad_enabled(upstream is not None):
        getattr(embeds, LEARNED)(x, coord)
    if upstream is not None:
        x.backward(upstream)


def ready(
    embeds: Any, x: Tensor, coord: Tensor, upstream: Tensor | None, values: Iterator[Tensor] | None
) -> Callable[[], None]:
    """The next call, on a table of the next ``values``; None: it stays as it is."""
    table = embeds.pos_embed
    table.requires_grad_(upstream is not None)
    table.grad = None
    if values is not None:
        table.data.copy_(next(values))
    if upstream is not None:
        x = activation(x)
    return partial(call, embeds, x, coord, upstream)


def _plain_add(x: Tensor, added: Tensor, upstream: Tensor | None) -> None:
    x.add_(added)
    if upstream is not None:
        upstream.sum((0, 1))


def sides(
    work: Workload,
    batch: int,
    phase: str,
    names: Sequence[str],
    stack: ExitStack,
    channels: int = 768,
) -> dict[str, Ready]:
    """What the contenders of these names do on a batch, until ``stack`` is closed."""
    kept.clear_all()
    numbers = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    coord = work.coordinates(batch)
    x, added, gradient = numbers(3, *coord.shape[:2], channels)
    upstream = None
    if phase == "train":
        upstream = gradient
    values = [numbers(1, *work.table, channels) for _ in range(2)]

    made: dict[str, Ready] = {}
    for name in names:
        if name == PLAIN_ADD:
            made[name] = always(partial(_plain_add, x, added, upstream))
            continue
        embeds = work.embeds(channels)
        stack.enter_context(served(name, embeds))
        new_values = None
        if phase != "frozen":
            new_values = cycle(values)
        made[name] = partial(ready, embeds, x, coord, upstream, new_values)
    return made


def races(name: str) -> Iterator[list[Row]]:
    """Rows of the races of a workload, of 64 images in each phase."""
    for phase in PHASES:
        facts = dict(workload=name, phase=phase, batch=BATCH)
        with ExitStack() as stack:
            made = sides(WORKLOADS[name], BATCH, phase, NAMES, stack)
            yield time_race(facts, made)
