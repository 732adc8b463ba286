"""Races of the position embedding: the step alone, forward ("infer", "frozen") or forward and backward ("train").

| phase | gradient | the table |
| --- | --- | --- |
| infer | no | changes before every call, so that nothing kept from the last one helps |
| frozen | no | is the same on every call |
| train | of the table and of ``x`` | changes before every call, as an optimizer changes it |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from ..contenders import LEARNED, NAMES, OURS, PLAIN_ADD, missing, use
from ..models import DTYPES
from .race import Contender, Race
from .workloads import Workload, coordinates

CONTENDERS = (*NAMES, PLAIN_ADD)
__all__ = ["CONTENDERS", "DTYPES", "PHASES", "races"]
PHASES = ("infer", "frozen", "train")
MOST_BYTES = 5 * 2**30  # of the table gradients that one contender makes


class _Activation(torch.autograd.Function):
    """``x`` as the output of an earlier layer, which takes the gradient of ``x`` and does nothing with it.

    PyTorch would copy the gradient of a leaf into ``.grad``, which is no part of the step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def races(
    workloads: Sequence[Workload],
    batches: Sequence[int] = (64,),
    dtypes: Sequence[str] = ("float32",),
    phases: Sequence[str] = PHASES,
    contenders: Sequence[str] = CONTENDERS,
    device: str = "cpu",
    channels: int = 768,
) -> Iterator[Race]:
    """One race per workload, dtype, phase and batch size; the smallest batch first.

    A race can run until the next one is asked for.
    """
    for workload, dtype, phase, batch in product(workloads, dtypes, phases, sorted(set(batches))):
        with ExitStack() as stack:
            shape = batch, channels
            yield _race(workload, shape, dtype, phase, contenders, torch.device(device), stack)


def _race(
    workload: Workload, shape: tuple[int, int], dtype: str, phase: str, names: Sequence[str], device: Any, on: ExitStack
) -> Race:
    batch, channels = shape
    grids = workload.grids(batch)
    coord = coordinates(grids).to(device)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def tokens() -> Tensor:
        return random(*coord.shape[:2], channels, dtype=getattr(torch, dtype))

    x, g = tokens(), tokens() if phase == "train" else None
    values = [random(1, *workload.table, channels) for _ in range(2)]
    made, left_out = [], dict[str, str]()
    for name in names:
        if name == PLAIN_ADD:
            made.append(_plain_add(x, tokens(), g))
            continue
        embeds = workload.embeds(channels).to(device)
        embeds.pos_embed.data.copy_(values[0])
        why = missing(name, embeds) or _too_large(name, workload, batch, phase, channels)
        if why:
            left_out[name] = why
        else:
            on.enter_context(use(name, embeds))
            made.append(_contender(name, embeds, coord, x, g, cycle(values) if phase != "frozen" else None, on))
    about = dict(
        tokens=sum(h * w for h, w in grids),
        length=coord.shape[1],
        grids=len(set(grids)),
        channels=channels,
        table=workload.options,
        device=device.type,
        x_bytes=x.numel() * x.element_size(),
        left_out=left_out,
    )
    return Race("pos_embed", workload.name, phase, batch, dtype, tuple(made), about)


def _contender(
    name: str, embeds: Any, coord: Tensor, x: Tensor, g: Tensor | None, values: Iterator[Tensor] | None, on: ExitStack
) -> Contender:
    table, anchor = embeds.pos_embed, torch.zeros((), device=x.device, requires_grad=True)
    table.requires_grad_(g is not None)
    running = [True]
    on.callback(running.clear)

    def prepare() -> Tensor:
        if not running:  # timm's own code would run under our name
            raise RuntimeError("this race is over: run it before the next one is asked for")
        if values is not None:
            with torch.no_grad():
                table.copy_(next(values))
        table.grad = None
        return x if g is None else _Activation.apply(x.detach(), anchor)

    def forward(x: Tensor) -> None:
        with torch.no_grad():
            getattr(embeds, LEARNED)(x, coord)

    def step(x: Tensor) -> None:
        getattr(embeds, LEARNED)(x, coord)
        x.backward(g)

    return Contender(name, forward if g is None else step, prepare, ours=name in OURS)


def _plain_add(x: Tensor, ready: Tensor, g: Tensor | None) -> Contender:
    """One addition of ready numbers into ``x``; in training also one reading of the gradient."""

    def touch(_: None) -> None:
        x.add_(ready)
        if g is not None:
            g.sum((0, 1))

    return Contender(PLAIN_ADD, touch)


def _too_large(name: str, workload: Workload, batch: int, phase: str, channels: int) -> str | None:
    """``F.grid_sample`` on an expanded table makes a gradient of that table for every sample."""
    need = 4 * batch * channels * workload.table[0] * workload.table[1]
    if phase == "train" and name.startswith(("timm-flag", "issue-2514")) and need > MOST_BYTES:
        return f"its backward needs {need / 2**30:.0f} GiB"
    return None
