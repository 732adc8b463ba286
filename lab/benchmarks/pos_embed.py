"""Races of the position embedding alone, forward, or forward and backward.

| phase | gradient | the table |
| --- | --- | --- |
| infer | no | changes before every call, so that nothing kept from the last one helps |
| frozen | no | is the same on every call |
| train | of the table and of ``x`` | changes before every call, as an optimizer changes it |
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product, repeat
from typing import Any

import torch
from racing import Race, Row, Timed, time_race
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from timm_naflex_fast.commands.measure.bench.workloads import (
    Draw,
    Grid,
    coordinates,
    fit_aspect,
    siglip_grids,
)
from timm_naflex_fast.commands.measure.contenders import BASELINE, CONTENDERS, use
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.pos_embed import kept

LEARNED = "_apply_learned_naflex_pos_embed"
SAMPLED = "_apply_learned_naflex_pos_embed_grid_sample"
OWN = dict(vars(NaFlexEmbeds))  # timm's methods, before any is replaced
PLAIN_ADD = "plain-add"
"""A contender that adds ready numbers to the tokens: it shows what touching the memory costs."""

PHASES = ("infer", "frozen", "train")
ALL = (*CONTENDERS, PLAIN_ADD)
FEW = (BASELINE, "timm-flag-bilinear", "interpolate_cached", "grid_sample", "matmul", PLAIN_ADD)
NEW_GRIDS = [(h, w) for h in range(4, 129) for w in range(4, 129) if h * w <= 1024]
random.Random(0).shuffle(NEW_GRIDS)


@dataclass(frozen=True)
class Workload:
    """Batches of grids, and the table that is resampled to them.

    Attributes:
        name: in tables.
        draw: a sample's grid (h, w), by a random generator.
        length: tokens to which a batch is padded; 0: as many as its longest image has.
        table: its size (H0, W0).
        mode: "bilinear" or "bicubic".
        more: further options of timm's NaFlexEmbeds, without their "pos_embed_".
    """

    name: str
    draw: Draw
    length: int = 0
    table: Grid = (16, 16)
    mode: str = "bilinear"
    more: dict[str, Any] = field(default_factory=dict)

    def grids(self, batch: int) -> list[Grid]:
        """The grids of a batch, always the same ones; a smaller batch begins a larger one."""
        source = random.Random(f"{self.name} 0")
        return [self.draw(source) for _ in range(batch)]

    def coordinates(self, batch: int) -> Iterator[Tensor]:
        """Coordinates (B, N, 2) of batch after batch, all the same."""
        return repeat(coordinates(self.grids(batch), self.length))

    def embeds(self, channels: int) -> NaFlexEmbeds:
        """timm's NaFlexEmbeds with this table (and a projection that is not used)."""
        return NaFlexEmbeds(
            1,
            1,
            channels,
            class_token=False,
            proj_type="linear",
            pos_embed="learned",
            pos_embed_grid_size=self.table,
            pos_embed_interp_mode=self.mode,
            **{f"pos_embed_{name}": value for name, value in self.more.items()},
        )


class Unseen(Workload):
    """Every batch has other grids: of 2,989 none comes twice."""

    def coordinates(self, batch: int) -> Iterator[Tensor]:
        """Coordinates (B, 1024, 2) of batch after batch."""
        for first in range(0, len(NEW_GRIDS) - batch, batch):
            yield coordinates(NEW_GRIDS[first : first + batch], self.length)


class Dropped(Workload):
    """Of each image a quarter of its tokens is left, in random order; but first the last one, which
    tells the grid."""

    def coordinates(self, batch: int) -> Iterator[Tensor]:
        """The same coordinates (B, N, 2) each time."""
        source = random.Random(0)
        images = []
        for h, w in self.grids(batch):
            last = h * w - 1
            others = source.sample(range(last), math.ceil(h * w / 4) - 1)
            images.append(coordinates([(h, w)])[0, [last, *others]])  # (tokens, 2)
        return repeat(pad_sequence(images, batch_first=True))


# Width over height, the commonest first; the shapes that photographs in ImageNet mostly have.
ASPECTS = (4 / 3, 3 / 2, 3 / 4, 1.0, 2 / 3, 16 / 9, 7 / 5, 5 / 7, 9 / 16, 2.0, 1 / 2, 7 / 3)
ZIPF = [1 / rank for rank in range(1, len(ASPECTS) + 1)]


def _imagenet(source: random.Random) -> Grid:
    (aspect,) = source.choices(ASPECTS, ZIPF)
    return fit_aspect(aspect, 576)


def _extreme(source: random.Random) -> Grid:
    n = source.randint(1, 576)
    h, w = source.choice([(1, n), (2, 288), (3, 190), (4, 144)])
    if source.random() < 0.5:
        return h, w
    return w, h


def _uniform(low: int, high: int) -> Draw:
    return lambda source: (source.randint(low, high), source.randint(low, high))


# Grids as models and data sets in use have them.
_ALL_WORKLOADS = (
    Workload("single", _uniform(24, 24)),
    Workload("imagenet", _imagenet, mode="bicubic"),
    Workload("siglip", siglip_grids(256)),
    Workload("diverse", _uniform(4, 31), table=(32, 32), mode="bicubic"),  # timm issue 2514's
    Workload("extreme", _extreme, mode="bicubic"),
    Workload(
        "radio",
        _uniform(16, 48),
        table=(128, 128),
        more=dict(antialias=False, align_corners=True, ar_preserving=True),
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL_WORKLOADS}


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


def race(
    work: Workload,
    batch: int,
    dtype: str,
    phase: str,
    names: Sequence[str],
    stack: ExitStack,
    channels: int = 768,
) -> Race:
    """The race of these contenders on a batch; it can run until ``stack`` is closed."""
    kept.clear_all()
    grids = work.grids(batch)
    batches = work.coordinates(batch)
    random_numbers = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    values = [random_numbers(1, *work.table, channels) for _ in range(2)]

    def tokens() -> Tensor:
        length = next(batches).shape[1]
        return random_numbers(batch, length, channels).to(getattr(torch, dtype))

    x = tokens()
    upstream = None
    if phase == "train":
        upstream = tokens()
    made = []
    for name in names:
        if name == PLAIN_ADD:
            made.append(plain_add(x, tokens(), upstream))
            continue
        embeds = work.embeds(channels)
        embeds.pos_embed.data.copy_(values[0])
        stack.enter_context(ready(name, embeds))
        new_values = None
        if phase != "frozen":
            new_values = cycle(values)
        made.append(timed(name, embeds, batches, x, upstream, new_values))
    about = dict(
        tokens=sum(h * w for h, w in grids),
        grids=len(set(grids)),
        channels=channels,
        table=f"{work.table[0]}x{work.table[1]} {work.mode}",
        device="cpu",
    )
    return Race("pos_embed", work.name, phase, batch, dtype, tuple(made), about)


def ready(name: str, embeds: Any) -> AbstractContextManager[None]:
    """Inside, ``embeds._apply_learned_naflex_pos_embed`` is the contender.

    timm's own code is called directly: the way to it through a replaced method is not timed.
    """
    if name not in STRATEGY_NAMES:
        method = SAMPLED
        if name == BASELINE:
            method = LEARNED
        setattr(embeds, LEARNED, OWN[method].__get__(embeds))
    return use(name, embeds)


def timed(
    name: str,
    embeds: Any,
    batches: Iterator[Tensor],
    x: Tensor,
    upstream: Tensor | None,
    values: Iterator[Tensor] | None,
) -> Timed:
    """A contender that adds its embeddings into ``x``.

    Args:
        name: of the contender.
        embeds: a NaFlexEmbeds, which computes as the contender does.
        batches: coordinates (B, N, 2), the next ones in each run.
        x: tokens (B, N, C).
        upstream: the gradient of ``x``; None: there is no backward.
        values: of the table, the next ones before each run; None: it stays as it is.
    """
    table = embeds.pos_embed
    table.requires_grad_(upstream is not None)
    anchor = torch.zeros((), device=x.device, requires_grad=True)

    def prepare() -> tuple[Tensor, Tensor]:
        if values is not None:
            with torch.no_grad():
                table.copy_(next(values))
        table.grad = None
        if upstream is None:
            return x, next(batches)
        return _Activation.apply(x.detach(), anchor), next(batches)

    def step(inputs: tuple[Tensor, Tensor]) -> None:
        x, coord = inputs
        with torch.set_grad_enabled(upstream is not None):
            getattr(embeds, LEARNED)(x, coord)
        if upstream is not None:
            x.backward(upstream)

    return Timed(name, step, prepare)


def plain_add(x: Tensor, ready: Tensor, upstream: Tensor | None) -> Timed:
    """One addition of ready numbers into ``x``; in training also one reading of the gradient."""

    def touch(_: None) -> None:
        x.add_(ready)
        if upstream is not None:
            upstream.sum((0, 1))

    return Timed(PLAIN_ADD, touch)


def races(
    tiny: bool,
    *,
    names: Sequence[str],
    contenders: Sequence[str] = ALL,
    batches: Sequence[int] = (64,),
    dtypes: Sequence[str] = ("float32",),
    phases: Sequence[str] = PHASES,
    rounds: int = 30,
    budget: float = 1.0,
) -> Iterator[list[Row]]:
    """Rows of race after race: of each workload that is named, dtype, phase and batch.

    Args:
        tiny: shows only that they run.
        names: of ``WORKLOADS``.
        contenders: of ``ALL``.
        batches: images in a batch.
        dtypes: of the tokens.
        phases: of ``PHASES``.
        rounds: of each race, at most.
        budget: seconds for each contender in a race.
    """
    channels = 768
    if tiny:
        channels = 4
        batches = (1,)
    for name, dtype, phase, batch in product(names, dtypes, phases, batches):
        with ExitStack() as stack:
            made = race(WORKLOADS[name], batch, dtype, phase, contenders, stack, channels=channels)
            yield time_race(made, budget, tiny, rounds)


def unseen(tiny: bool) -> Iterator[list[Row]]:
    """The position embedding of grids that never came before, padded to 1,024 tokens; and of images
    with lost tokens.

    As many rounds as there are grids for: a batch for each contender in each round, warm-ups too,
    and two for x and its gradient.
    """
    new = Unseen("unseen", lambda source: source.choice(NEW_GRIDS), 1024)
    dropped = Dropped("dropped", siglip_grids(256))
    names = (BASELINE, "interpolate_cached", "matmul")
    rounds = {1: 200, 16: 60, 64: 13}  # by batch
    channels = 192
    if tiny:
        rounds = {1: 1}
        channels = 4
    for batch, work, phase in product(rounds, (new, dropped), ("infer", "train")):
        with ExitStack() as stack:
            made = race(work, batch, "float32", phase, names, stack, channels=channels)
            yield time_race(made, 2.0, tiny, rounds[batch])
