"""What eager code would cost on a GPU, counted on a CPU and without a clock.

Every operator is seen (``TorchDispatchMode``). It reads each element of its inputs once and writes
each element of its results once; gathers and scattered additions touch as many rows as they name.
Views and empty tensors cost nothing. On a GPU each operator is a kernel, or several. The tensors
may be PyTorch's fake ones, which have no numbers.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from timm_naflex_fast import tracing
from timm_naflex_fast.pos_embed import kept

GATHERS = {"index", "index_select", "gather", "embedding"}
BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}
SCATTERS = {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # they write their first argument without reading it
EMPTY = {
    "_debug_has_internal_overlap",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

# For these the host waits for the device: operators whose result is a number, or has a size that
# depends on numbers; and functions that call no operator on a CPU.
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
READS = {Tensor.cpu, Tensor.tolist}
LISTS = {torch.tensor, torch.as_tensor}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yields the costs of what runs inside, the way that it runs on a GPU.

    This package's caches serve as if nobody watched.

    - moved: bytes that operators read and write.
    - operators: that move any.
    - peak: the most bytes that are held at once, beyond those before.
    - host_waits: how often the host would wait for a GPU. A tensor that ``.cpu()`` made counts as
      one of the GPU still.
    """
    who = tracing.watcher()
    as_if_alone = patch.object(tracing, "watcher", lambda: who)
    # There nothing is kept of a frozen table.
    as_if_on_gpu = patch.object(kept, "frozen", lambda *_: None)
    with as_if_alone, as_if_on_gpu, _Operators() as operators, _Reads(operators.count):
        yield operators.count


class _Reads(TorchFunctionMode):
    """Counts calls that copy between host and device."""

    def __init__(self, count: dict[str, int]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS or (func in LISTS and "device" in kwargs):
            self.count["host_waits"] += 1
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Counts operators, the bytes they touch, and those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = dict(moved=0, operators=0, peak=0, host_waits=0)
        self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a fake tensor
            return func(*args, **kwargs)

        schema = func._schema
        given = {argument.name: value for argument, value in zip(schema.arguments, args)}
        given |= kwargs
        for tensor in _tensors(given):
            self._hold(tensor, size=0)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._hold(tensor, size=tensor.untyped_storage().nbytes())

        name = func.overloadpacket.__name__
        if _waits(name, given):
            self.count["host_waits"] += 1
        if name not in EMPTY and not _is_view(schema):
            moved = sum(_moved(name, schema, given, out))
            self.count["moved"] += moved
            self.count["operators"] += moved > 0
        return out

    def _hold(self, tensor: Tensor, size: int) -> None:
        """Count new memory until it is freed."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(memory, self._free, key, size)
            self._held += size
            self.count["peak"] = max(self.count["peak"], self._held)

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self._held -= size


def _waits(name: str, given: dict[str, Any]) -> bool:
    """Whether the host waits for an operator's numbers."""
    if name in WAITS:
        return True
    if name == "repeat_interleave":
        return given.get("output_size") is None
    if name in GATHERS | SCATTERS:
        return any(index.dtype == torch.bool for index in _tensors(given.get("indices")))
    return False


def _is_view(schema: Any) -> bool:
    """Whether an operator gives a tensor of its argument's memory, and writes nothing."""
    aliases = [result.alias_info for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _moved(name: str, schema: Any, given: dict[str, Any], out: Any) -> Iterator[int]:
    """The bytes that an operator reads and writes of each tensor."""
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        reads = not writes or (place == 0 and name not in OVERWRITES)
        for tensor in _tensors(given.get(argument.name)):
            size = _bytes(tensor)
            if place == 0:
                size = min(size, _most_of_first(name, given, out))
            yield size * (reads + writes)

    results = out if isinstance(out, (tuple, list)) else [out]
    for result, returned in zip(results, schema.returns):
        if returned.alias_info is None:
            for tensor in _tensors(result):
                yield _bytes(tensor)


def _most_of_first(name: str, given: dict[str, Any], out: Any) -> Any:
    """The most bytes that are touched of the first argument: of some operators, the named rows."""
    if name in BAGS:
        weight = given["weight"]
        return given["indices"].numel() * _bytes(weight) // max(1, len(weight))
    if name in GATHERS:
        return out.nbytes
    if name in SCATTERS:
        added = next(given[key] for key in ("source", "values", "src") if key in given)
        return added.nbytes
    return math.inf


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of any structure."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """The memory behind a tensor: elements that an expanded dimension repeats count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        elements *= size if stride else min(size, 1)
    return tensor.element_size() * elements
