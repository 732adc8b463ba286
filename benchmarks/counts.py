"""Count what one step of the position embedding costs, so that the figures hold on every machine.

uv run benchmarks/measure.py counts

Every operator that PyTorch executes is seen (``TorchDispatchMode``). It reads each element of its inputs once and
writes each element of its results once; gathers and scattered additions touch as many rows as they name. Views and
empty tensors cost nothing.

"memory" leaves out what a processor finds in its cache: operands no larger than one sample's tokens that one of the
last four operators touched. All other operands come from memory and go there.

The operators do not depend on the number of channels, so bytes are linear in it: each race is counted at two small
widths and extended to 768.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from timm_naflex_fast.measure.bench.pos_embed import race as make
from timm_naflex_fast.measure.bench.race import PLAIN_ADD
from timm_naflex_fast.measure.bench.workloads import WORKLOADS

CONTENDERS = ("stock", "timm-flag-bilinear", "grid_sample", "interpolate_cached", "matmul", PLAIN_ADD)
NARROW = (16, 32)  # channels; with fewer, a sample's tokens are no larger than its coordinates
CACHED_OPERATORS = 4
GATHERS = {"index", "index_select", "gather", "embedding", "take", "_embedding_bag", "_embedding_bag_forward_only"}
SCATTERS = {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # they write their first argument without reading it
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


@dataclass
class Count:
    """What a piece of work costs.

    Attributes:
        read: bytes that operators read.
        written: bytes that operators write.
        memory: bytes read and written without those that the cache holds.
        operators: that read or write; on a GPU each launches at least one kernel.
        host_waits: times that the host needs a number from the device.
        whole_writes: operators that write at least as many bytes as ``x`` has.
    """

    read: int = 0
    written: int = 0
    memory: int = 0
    operators: int = 0
    host_waits: int = 0
    whole_writes: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, whole: int, sample: int) -> None:
        super().__init__()
        self.count, self._whole, self._sample = Count(), whole, sample
        self._recent: deque[dict[tuple[int, int], Any]] = deque(maxlen=CACHED_OPERATORS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, schema = func._schema.name.split("::")[-1], func._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, args)} | (kwargs or {})
        booleans = name in GATHERS | SCATTERS and any(t.dtype == torch.bool for t in _tensors(given.get("indices")))
        self.count.host_waits += name in WAITS or booleans
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view or name in EMPTY:
            return out
        touched: dict[tuple[int, int], Any] = {}
        read = written = 0
        for tensor, reads, writes in _operands(name, schema, given, out):
            read, written = read + reads, written + writes
            if not self._in_cache(tensor, touched):
                self.count.memory += reads + writes
        self._recent.append(touched)
        self.count.read += read
        self.count.written += written
        self.count.operators += bool(read or written)
        self.count.whole_writes += written >= self._whole
        return out

    def _in_cache(self, tensor: Tensor, touched: dict[tuple[int, int], Any]) -> bool:
        if _bytes(tensor) > self._sample:
            return False
        memory = tensor.untyped_storage()  # kept, so that no other tensor gets its address meanwhile
        key = memory._cdata, tensor.storage_offset()
        touched[key] = memory
        return any(key in before for before in self._recent)


def _operands(name: str, schema: Any, given: dict[str, Any], out: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Each tensor that an operator touches, with the bytes that it reads and writes of it."""
    first = schema.arguments[0].name if schema.arguments else ""
    rows = None  # the most that is touched of the first argument, where only some of its rows are
    if "embedding_bag" in name and name in GATHERS:
        weight = given["weight"]
        rows = given["indices"].numel() * _bytes(weight) // max(1, len(weight))
    elif name in GATHERS:
        rows = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(out))
    elif name in SCATTERS:
        added = given.get("source", given.get("values", given.get("src")))
        rows = added.numel() * added.element_size()
    for argument in schema.arguments:
        for tensor in _tensors(given.get(argument.name)):
            size = _bytes(tensor) if rows is None or argument.name != first else min(rows, _bytes(tensor))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or (name not in OVERWRITES and argument.name == first)
            yield tensor, size * reads, size * writes
    for result, returned in zip(out if isinstance(out, (tuple, list)) else [out], schema.returns):
        if returned.alias_info is None:
            for tensor in _tensors(result):
                yield tensor, 0, _bytes(tensor)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """The memory behind a tensor: elements that an expanded dimension repeats count once."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.element_size() * math.prod(sizes)


@contextmanager
def counted(whole: int, sample: int) -> Iterator[Count]:
    """Count the operators inside. ``whole``: the bytes of ``x``; ``sample``: those of one sample's tokens."""

    def watched(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.count.host_waits += 1
            return original(self, *args, **kwargs)

        return patch.object(Tensor, name, read)

    # On a CPU these dispatch no operator; on a GPU they wait for it.
    with _Counter(whole, sample) as mode, watched("tolist"), watched("numpy"), watched("cpu"):
        yield mode.count


def count_race(
    workload: str, batch: int, phase: str, contenders: Sequence[str] = CONTENDERS, channels: int = 768
) -> list[dict[str, Any]]:
    """A row per contender: what the race is, and its counts at ``channels``, where the line through two widths leads.

    Raises:
        ValueError: the operators depend on the channels.
    """
    narrow: list[list[dict[str, Any]]] = []
    for width in NARROW:
        narrow.append([])
        with ExitStack() as on:
            race = make(WORKLOADS[workload], batch, "float32", phase, contenders, on, channels=width)
            about = {name: race.about[name] for name in ("tokens", "grids", "x_bytes")}
            about |= dict(workload=workload, phase=phase, batch=batch, dtype="float32", channels=width)
            for one in race.contenders:
                one.run(one.prepare())  # fills the caches
                argument = one.prepare()
                with counted(about["x_bytes"], about["x_bytes"] // batch) as count:
                    one.run(argument)
                narrow[-1].append({**about, "contender": one.name, **asdict(count)})
    low, high = NARROW

    def extend(a: Any, b: Any) -> Any:
        return a if a == b else a + (b - a) * (channels - low) // (high - low)

    if any(small[name] != large[name] for small, large in zip(*narrow) for name in ("operators", "host_waits")):
        raise ValueError(f"the operators depend on the channels: {narrow}")
    return [{name: extend(small[name], large[name]) for name in large} for small, large in zip(*narrow)]


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows of race after race."""
    batches, channels = ((2,), 32) if tiny else ((64, 512), 768)
    for workload, batch, phase in product(("siglip", "diverse"), batches, ("infer", "train")):
        yield count_race(workload, batch, phase, channels=channels)
