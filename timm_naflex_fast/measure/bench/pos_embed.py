"""Races of the position embedding: the step alone, forward ("infer", "frozen") or forward and
backward ("train").

| phase | gradient | the table |
| --- | --- | --- |
| infer | no | changes before every call, so that nothing kept from the last one helps |
| frozen | no | is the same on every call |
| train | of the table and of ``x`` | changes before every call, as an optimizer changes it |
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...resampling import kept
from ..contenders import CONTENDERS, LEARNED, PLAIN_ADD, use
from .race import Race, Timed
from .workloads import Workload

PHASES = ["infer", "frozen", "train"]
DEFAULTS = dict[str, Any](
    batches=[64], dtypes=["float32"], phases=PHASES, contenders=[*CONTENDERS, PLAIN_ADD]
)


class _Activation(torch.autograd.Function):
    """``x`` as the output of an earlier layer, which takes the gradient of ``x`` and does nothing
    with it.

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
    names: list[str],
    stack: ExitStack,
    device: str,
    channels: int,
) -> Race:
    """The race of these contenders on a batch; it can run until ``stack`` is closed."""
    kept.clear_all()
    grids, batches = work.grids(batch), (coord.to(device) for coord in work.coordinates(batch))
    random = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    values = [random(1, *work.table, channels) for _ in range(2)]

    def tokens() -> Tensor:
        return random(*next(batches).shape[:2], channels).to(getattr(torch, dtype))

    x, g = tokens(), tokens() if phase == "train" else None
    made = []
    for name in names:
        if name == PLAIN_ADD:
            made.append(plain_add(x, tokens(), g))
            continue
        with torch.device(device):
            embeds = work.embeds(channels)
        embeds.pos_embed.data.copy_(values[0])
        stack.enter_context(use(name, embeds))
        made.append(
            timed(name, embeds, batches, x, g, cycle(values) if phase != "frozen" else None)
        )
    about: dict[str, Any] = dict(
        tokens=sum(h * w for h, w in grids), grids=len(set(grids)), channels=channels
    )
    about |= dict(table=f"{work.table[0]}x{work.table[1]} {work.mode}", device=device)
    return Race("pos_embed", work.name, phase, batch, dtype, tuple(made), about)


def timed(
    name: str,
    embeds: Any,
    batches: Iterator[Tensor],
    x: Tensor,
    g: Tensor | None,
    values: Iterator[Tensor] | None,
) -> Timed:
    """A contender that adds into ``x``, each time at the next coordinates (B, N, 2) of ``batches``.

    With ``g``, the gradient of ``x``, it goes backward too. The table takes the next of ``values``
    before each run.
    """
    table, anchor = embeds.pos_embed, torch.zeros((), device=x.device, requires_grad=True)
    table.requires_grad_(g is not None)

    def prepare() -> tuple[Tensor, Tensor]:
        if values is not None:
            with torch.no_grad():
                table.copy_(next(values))
        table.grad = None
        return x if g is None else _Activation.apply(x.detach(), anchor), next(batches)

    def step(inputs: tuple[Tensor, Tensor]) -> None:
        x, coord = inputs
        with torch.set_grad_enabled(g is not None):
            getattr(embeds, LEARNED)(x, coord)
        if g is not None:
            x.backward(g)

    return Timed(name, step, prepare)


def plain_add(x: Tensor, ready: Tensor, g: Tensor | None) -> Timed:
    """One addition of ready numbers into ``x``; in training also one reading of the gradient."""

    def touch(_: None) -> None:
        x.add_(ready)
        if g is not None:
            g.sum((0, 1))

    return Timed(PLAIN_ADD, touch)
