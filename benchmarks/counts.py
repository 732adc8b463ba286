"""Count what one step of the position embedding costs on a CUDA device, without one and without a clock.

uv run benchmarks/measure.py counts

timm's code and ``eager`` read coordinates: they run on the tests' pretended CUDA device, whose memory is the CPU's, and
take the way that they take there. The traceable form, which graphs hold and CUDA graphs capture, reads none and takes
the same way on every device: it runs on PyTorch's fake tensors, which have no numbers.

Every operator on the device is seen (``TorchDispatchMode``). It reads each element of its inputs once and writes each
element of its results once; gathers and scattered additions touch as many rows as they name. Views and empty tensors
cost nothing. Nothing is found in a cache. On a GPU each operator is a kernel, or several.

The operators do not depend on the number of channels, so bytes are linear in it: each step is counted at two small
widths and extended to 768.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_naflex_fast import tracing
from timm_naflex_fast.measure.bench.pos_embed import plain_add, timed
from timm_naflex_fast.measure.bench.race import PLAIN_ADD
from timm_naflex_fast.measure.bench.workloads import WORKLOADS
from timm_naflex_fast.measure.contenders import use

TRACEABLE = "matmul, traceable"
CONTENDERS = ("stock", "timm-flag-bilinear", "matmul", TRACEABLE, PLAIN_ADD)
NARROW = (16, 32)  # channels; with fewer, a token is no larger than its coordinates
GATHERS = {"index", "index_select", "gather", "embedding", "_embedding_bag", "_embedding_bag_forward_only"}
SCATTERS = {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # they write their first argument without reading it
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Counter(TorchDispatchMode):
    """Inside, ``count`` grows with each operator on the device.

    - read, written: bytes.
    - operators: that read or write.
    - peak: the most bytes that are held at once, beyond those before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self._held = dict(read=0, written=0, operators=0, peak=0), 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | (kwargs or {})
        for tensor in _on_device(given):
            self._hold(tensor, 0)
        out = func(*args, **(kwargs or {}))
        for tensor in _on_device(out):
            self._hold(tensor, tensor.untyped_storage().nbytes())
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and func.namespace != "prim" and func.overloadpacket.__name__ not in EMPTY:
            touched = list(_operands(func.overloadpacket.__name__, func._schema, given, out))
            read, written = (sum(column) for column in zip((0, 0), *touched))
            for key, more in dict(read=read, written=written, operators=bool(read or written)).items():
                self.count[key] += more
        return out

    def _hold(self, tensor: Tensor, size: int) -> None:
        """Count new memory until it is freed."""
        memory = tensor.untyped_storage()
        if (key := memory._cdata) not in self._known:
            self._known[key] = weakref.finalize(memory, self._free, key, size)
            self._held += size
            self.count["peak"] = max(self.count["peak"], self._held)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self._held -= size


def _operands(name: str, schema: Any, given: dict[str, Any], out: Any) -> Iterator[tuple[int, int]]:
    """The bytes that an operator reads and writes of each tensor on the device."""
    first = schema.arguments[0].name if schema.arguments else ""
    rows = None  # the most that is touched of the first argument, where only some of its rows are
    if name.startswith("_embedding_bag") and name in GATHERS:
        rows = given["indices"].numel() * _bytes(given["weight"]) // max(1, len(given["weight"]))
    elif name in GATHERS:
        rows = sum(tensor.nbytes for tensor in _on_device(out))
    elif name in SCATTERS:
        rows = given.get("source", given.get("values", given.get("src"))).nbytes
    for argument in schema.arguments:
        for tensor in _on_device(given.get(argument.name)):
            size = _bytes(tensor) if rows is None or argument.name != first else min(rows, _bytes(tensor))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or (name not in OVERWRITES and argument.name == first)
            yield size * reads, size * writes
    for result, returned in zip(out if isinstance(out, (tuple, list)) else [out], schema.returns):
        if returned.alias_info is None:
            for tensor in _on_device(result):
                yield 0, _bytes(tensor)


def _on_device(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor) or getattr(leaf, "is_cuda", False)]


def _bytes(tensor: Tensor) -> int:
    """The memory behind a tensor: elements that an expanded dimension repeats count once."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.element_size() * math.prod(sizes)


def count_step(name: str, workload: str, batch: int, phase: str, channels: int) -> dict[str, int]:
    """The cost of one step of a contender at ``channels``, and how often the host waits for the device.

    It has run before, so its caches are full.
    """
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.support.second_device import OnDevice, SecondDevice, waits

    chosen = WORKLOADS[workload]
    embeds, coord = chosen.embeds(channels), next(chosen.coordinates(batch))
    with ExitStack() as on:
        patch = on.enter_context(MonkeyPatch.context())
        patch.setattr(tracing, "PLAIN", (*tracing.PLAIN, OnDevice))  # else such tensors are left to timm
        patch.setattr(torch, "as_tensor", lambda data, device: torch.tensor(data).to(device))  # which is made in C++
        device = SecondDevice(patch)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        on.enter_context(fake if name == TRACEABLE else device)
        to = fake.from_tensor if name == TRACEABLE else lambda tensor: tensor.to("cuda")
        embeds.pos_embed = torch.nn.Parameter(to(embeds.pos_embed.detach()))
        x, g = (to(torch.zeros(*coord.shape[:2], channels)) for _ in "xg")
        if name == PLAIN_ADD:
            contender = plain_add(x, x.clone(), g if phase == "train" else None)
        else:
            on.enter_context(use(name.split(",")[0], embeds))
            values = repeat(embeds.pos_embed.detach() * 2)  # a table that does not stay is not cached
            contender = timed(name, embeds, repeat(to(coord)), x, g if phase == "train" else None, values)
        if name != "stock":  # which caches nothing, and takes long
            contender.run(contender.prepare())
        argument = contender.prepare()
        waits.clear()
        with Counter() as counter:
            contender.run(argument)
    return {**counter.count, "host_waits": sum(waits.values())}


def count_race(
    workload: str, batch: int, phase: str, contenders: Sequence[str] = CONTENDERS, channels: int = 768
) -> list[dict[str, Any]]:
    """A row per contender: what the race is, and its counts at ``channels``, where the line through two widths leads.

    Raises:
        ValueError: the operators depend on the channels.
    """
    grids, rows, (low, high) = WORKLOADS[workload].grids(batch), [], NARROW
    about = dict(workload=workload, phase=phase, batch=batch, dtype="float32", channels=channels)
    about |= dict(tokens=sum(h * w for h, w in grids), grids=len(set(grids)))
    for name in contenders:
        small, large = (count_step(name, workload, batch, phase, width) for width in NARROW)
        if any(small[key] != large[key] for key in ("operators", "host_waits")):
            raise ValueError(f"the operators of {name} depend on the channels: {small}, {large}")
        counts = {key: n + (large[key] - n) * (channels - low) // (high - low) for key, n in small.items()}
        rows.append({**about, "contender": name, **counts})
    return rows


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows of race after race."""
    for workload, phase in product(("siglip", "diverse"), ("infer", "train")):
        yield count_race(workload, 2 if tiny else 512, phase)
