"""Races of the position embedding: the step alone, forward ("infer", "frozen") or forward and backward ("train").

| phase | gradient | the table |
| --- | --- | --- |
| infer | no | changes before every call, so that nothing kept from the last one helps |
| frozen | no | is the same on every call |
| train | of the table and of ``x`` | changes before every call, as an optimizer would have it |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from ...patching.install import enable
from ...patching.modes import own_flags
from . import peers
from .race import FLOOR, Contender, Race
from .workloads import WORKLOADS, Workload, coordinates

PHASES = ("infer", "frozen", "train")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_BYTES = 5 * 2**30  # of one peer's table gradient


class _Activation(torch.autograd.Function):
    """``x`` as the output of an earlier layer, which takes the gradient of ``x`` and does nothing with it.

    A leaf would have its gradient copied into ``.grad``; that is no part of the step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def races(
    workloads: Sequence[Workload] = tuple(WORKLOADS.values()),
    batches: Sequence[int] = (64,),
    dtypes: Sequence[str] = ("float32",),
    phases: Sequence[str] = PHASES,
    contenders: Sequence[str] = peers.NAMES,
    device: str = "cpu",
    channels: int = 768,
    seed: int = 0,
) -> Iterator[Race]:
    """One race per workload, dtype, phase and batch size.

    What a race needs is in place until one of another workload, dtype or phase is asked for.

    Raises:
        ValueError: a name that is not a phase, dtype or contender, with the valid ones; a batch below 1.
    """
    check(batches, dtypes, phases, contenders, channels=channels)
    for workload, dtype, phase in product(workloads, dtypes, phases):
        with ExitStack() as stack:
            for batch in sorted(set(batches)):
                yield _race(workload, batch, dtype, phase, contenders, torch.device(device), channels, seed, stack)


def check(
    batches: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    phases: Sequence[str] = (),
    contenders: Sequence[str] = (),
    device: str = "cpu",
    channels: int = 1,
) -> None:
    """Raise ValueError for a name that is not a phase, dtype or contender, with the valid ones, or a number below 1."""
    for what, names, valid in (
        ("phase", phases, PHASES),
        ("dtype", dtypes, DTYPES),
        ("contender", contenders, peers.NAMES),
    ):
        for name in names:
            if name not in valid:
                raise ValueError(f"{name!r} is not a {what}; valid: {', '.join(valid)}")
    if min(batches, default=1) < 1 or channels < 1:
        raise ValueError("batch sizes and channels must be at least 1")


def _race(
    workload: Workload,
    batch: int,
    dtype: str,
    phase: str,
    names: Sequence[str],
    device: torch.device,
    channels: int,
    seed: int,
    stack: ExitStack,
) -> Race:
    grids = workload.grids(batch, seed)
    coord = coordinates(grids).to(device)
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randn(*coord.shape[:2], channels, generator=generator, dtype=torch.float32).to(
            device, DTYPES[dtype]
        )

    left_out: dict[str, str] = {}
    for name in names:
        why = peers.missing(name) or _too_large(name, workload, batch, phase, channels)
        if why:
            left_out[name] = why
    x, g = tokens(), tokens() if phase == "train" else None
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
    values = [torch.randn(1, *workload.table, channels, generator=generator).to(device) for _ in range(2)]
    made = []
    for name in names:
        if name in left_out:
            continue
        if name == FLOOR:
            made.append(_floor(x, tokens(), g))
            continue
        embeds = workload.embeds(channels).to(device)
        if name in peers.OURS:
            stack.enter_context(enable(mode="stock", pos_embed=name, model=embeds))
        made.append(_contender(name, embeds, peers.adder(name, embeds, coord), phase, x, g, values))
    return Race("pos_embed", workload.name, phase, batch, dtype, tuple(made), about)


def _contender(
    name: str, embeds: Any, add: peers.Add, phase: str, x: Tensor, g: Tensor | None, values: list[Tensor]
) -> Contender:
    table, anchor = embeds.pos_embed, torch.zeros((), device=x.device, requires_grad=True)
    table.requires_grad_(phase == "train")
    table.data.copy_(values[0])
    versions = cycle(values)

    def checked() -> None:
        if name in peers.OURS and own_flags(embeds) is None:
            raise RuntimeError("this race is over: keep what races() returned until its last run")

    def renew() -> Tensor:
        checked()
        with torch.no_grad():
            table.copy_(next(versions))
        table.grad = None
        return x

    def same() -> Tensor:
        checked()
        return x

    def forward(x: Tensor) -> None:
        with torch.no_grad():
            add(x)

    def step(x: Tensor) -> None:
        add(x).backward(g)

    if phase == "train":
        return Contender(name, step, lambda: _Activation.apply(renew().detach(), anchor))
    return Contender(name, forward, renew if phase == "infer" else same)


def _floor(x: Tensor, ready: Tensor, g: Tensor | None) -> Contender:
    """The bytes that have to be touched: one addition into ``x``; in training one reading of the gradient."""

    def touch(_: None) -> None:
        x.add_(ready)
        if g is not None:
            g.sum((0, 1))

    return Contender(FLOOR, touch)


def _too_large(name: str, workload: Workload, batch: int, phase: str, channels: int) -> str | None:
    """``F.grid_sample`` on an expanded table makes a gradient of that table for every sample."""
    need = 4 * batch * channels * workload.table[0] * workload.table[1]
    if phase == "train" and name in ("stock-bilinear", "stock-bicubic", "issue-2514", "grid_sample"):
        return f"its backward needs {need / 2**30:.0f} GiB" if need > MOST_BYTES else None
    return None
