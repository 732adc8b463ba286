"""Races of the rotary tables: timm's ``NaFlexVit._generate_rope_naflex`` alone, on grids h, w uniform in 4..31.

| phase | what is timed |
| --- | --- |
| infer | making the tables; mixed ones block by block, each let go before the next |
| train | mixed ones alone: all blocks' tables, and the gradient of the frequencies from theirs |

The floor writes tables of the same size once and, in training, reads each one's gradient once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...patching.install import enable
from .race import BASELINE, FLOOR, Contender, Race

TYPES: dict[str, dict[str, Any]] = {
    "axial": {},
    "dinov3": dict(rope_temperature=100.0, rope_rotate_half=True),
    "mrope": dict(rope_mrope_section=(8, 12, 12)),
    "mixed": dict(rope_temperature=10.0, rope_grid_indexing="xy"),
}
PHASES = ("infer", "train")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTENDERS = (FLOOR, BASELINE, "batched")
HEADS, HEAD_DIM = 6, 64


def races(
    workloads: Sequence[str] = tuple(TYPES),
    batches: Sequence[int] = (64,),
    dtypes: Sequence[str] = ("float32",),
    phases: Sequence[str] = PHASES,
    contenders: Sequence[str] = CONTENDERS,
    device: str = "cpu",
    depth: int = 2,
    seed: int = 0,
) -> Iterator[Race]:
    """One race per rotary type (``workloads``), batch size, dtype and phase that the type has.

    Raises:
        ValueError: a name that is not a type, dtype, phase or contender, with the valid ones; a batch below 1; a type
            that the installed timm does not have.
    """
    for what, names, valid in (
        ("rotary type", workloads, TYPES),
        ("dtype", dtypes, DTYPES),
        ("phase", phases, PHASES),
        ("contender", contenders, CONTENDERS),
    ):
        for name in names:
            if name not in valid:
                raise ValueError(f"{name!r} is not a {what}; valid: {', '.join(valid)}")
    if min(batches, default=1) < 1:
        raise ValueError("batch sizes must be at least 1")
    for kind, batch, dtype, phase in product(workloads, sorted(batches), dtypes, phases):
        if phase == "infer" or kind == "mixed":
            with ExitStack() as stack:
                yield _race(kind, batch, dtype, phase, contenders, torch.device(device), depth, seed, stack)


def _race(
    kind: str,
    batch: int,
    dtype: str,
    phase: str,
    names: Sequence[str],
    device: torch.device,
    depth: int,
    seed: int,
    stack: ExitStack,
) -> Race:
    source = random.Random(seed)
    grids = [(source.randint(4, 31), source.randint(4, 31)) for _ in range(batch)]
    coord = torch.zeros(batch, max(h * w for h, w in grids), 2, dtype=torch.int64)
    for sample, (h, w) in enumerate(grids):
        coord[sample, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    coord = coord.to(device)
    width = HEADS * HEAD_DIM
    x = torch.zeros((), device=device, dtype=DTYPES[dtype]).expand(*coord.shape[:2], width)  # for its shape and dtype
    blocks, heads = (depth, HEADS) if kind == "mixed" else (1, 1)
    shape = (batch, heads, coord.shape[1], 2 * HEAD_DIM)
    g = torch.randn(shape, device=device).to(x.dtype) if phase == "train" else None
    made = []
    for name in names:
        if name == FLOOR:
            made.append(_floor(x, shape, blocks, g))
            continue
        model = _model(kind, depth).to(device)
        if name != BASELINE:
            stack.enter_context(enable(mode="stock", rope=name, model=model))
        made.append(_contender(name, model, x, coord, g))
    about = dict(
        tokens=sum(h * w for h, w in grids),
        length=coord.shape[1],
        grids=len(set(grids)),
        heads=HEADS,
        head_dim=HEAD_DIM,
        blocks=blocks,
        device=device.type,
        x_bytes=torch.Size(shape).numel() * x.element_size(),
    )
    return Race("rope", kind, phase, batch, dtype, tuple(made), about)


def _model(kind: str, depth: int) -> Any:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    settings: dict[str, Any] = dict(
        patch_size=1, embed_dim=HEADS * HEAD_DIM, depth=depth, num_heads=HEADS, mlp_ratio=0.1, pos_embed="none"
    )
    try:
        cfg = NaFlexVitCfg(**settings, class_token=False, reg_tokens=0, rope_type=kind, **TYPES[kind])
        return NaFlexVit(cfg, in_chans=1, num_classes=0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rotary type {kind!r} needs a newer timm: {error}") from error


def _contender(name: str, model: Any, x: Tensor, coord: Tensor, g: Tensor | None) -> Contender:
    def infer(_: None) -> None:
        with torch.no_grad():
            tables = model._generate_rope_naflex(x, coord)
            for table in [tables] if isinstance(tables, Tensor) else tables:
                del table

    def train(_: None) -> None:
        model.rope.freqs.grad = None
        tables = list(model._generate_rope_naflex(x, coord))
        torch.autograd.backward(tables, [g] * len(tables))

    return Contender(name, infer if g is None else train)


def _floor(x: Tensor, shape: tuple[int, ...], blocks: int, g: Tensor | None) -> Contender:
    """The bytes that have to be touched: every table written once, every gradient read once."""

    def touch(_: None) -> None:
        kept = []
        for _block in range(blocks):
            table = x.new_zeros(shape)
            if g is not None:
                kept.append(table)
                g.sum((0, 2))

    return Contender(FLOOR, touch)
