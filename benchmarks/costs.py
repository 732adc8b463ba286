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

from timm_naflex_fast.resampling import kept

GATHERS = {"index", "index_select", "gather", "embedding"}
BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}
SCATTERS = {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # they write their first argument without reading it
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# For these the host waits for the device: operators, whose result is a number or has a size that
# depends on numbers, and what calls no operator on a CPU.
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
READS, LISTS = {Tensor.cpu, Tensor.tolist}, {torch.tensor, torch.as_tensor}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yields the costs of what runs inside: the way of a GPU, and from this package's caches as if
    nobody watched.

    - read, written: bytes.
    - operators: that read or write.
    - peak: the most bytes that are held at once, beyond those before.
    - host_waits: how often the host would wait for a GPU. A tensor that ``.cpu()`` made counts as
      one of the GPU still.
    """
    watched = kept.watched()
    cached, on_gpu = (
        patch.object(kept, "watched", lambda: watched),
        patch.object(Tensor, "is_cpu", False),
    )
    with cached, on_gpu, _Operators() as operators, _Reads(operators.count):
        yield operators.count


class _Reads(TorchFunctionMode):
    """Counts calls that copy between host and device."""

    def __init__(self, count: dict[str, int]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count["host_waits"] += func in READS or (func in LISTS and "device" in (kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Counts operators, the bytes they touch, and those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = dict(read=0, written=0, operators=0, peak=0, host_waits=0)
        self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a fake tensor
            return func(*args, **kwargs)
        with self:  # in inference mode, what is made of other operators comes as one
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        given = {
            argument.name: value for argument, value in zip(func._schema.arguments, args)
        } | kwargs
        name = func.overloadpacket.__name__
        for tensor in _tensors(given):
            self._hold(tensor, 0)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._hold(tensor, tensor.untyped_storage().nbytes())
        masked = name in GATHERS | SCATTERS and any(
            i.dtype == torch.bool for i in _tensors(given.get("indices"))
        )
        repeats = name == "repeat_interleave" and given.get("output_size") is None
        self.count["host_waits"] += name in WAITS or masked or repeats
        view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        if not view and name not in EMPTY:
            read, written = map(sum, zip((0, 0), *_touched(name, func._schema, given, out)))
            for key, more in dict(
                read=read, written=written, operators=bool(read or written)
            ).items():
                self.count[key] += more
        return out

    def _hold(self, tensor: Tensor, size: int) -> None:
        """Count new memory until it is freed."""
        memory = tensor.untyped_storage()
        if (key := memory._cdata) not in self._known:
            self._known.add(key)
            weakref.finalize(memory, self._free, key, size)
            self._held += size
            self.count["peak"] = max(self.count["peak"], self._held)

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self._held -= size


def _touched(name: str, schema: Any, given: dict[str, Any], out: Any) -> Iterator[tuple[int, int]]:
    """The bytes that an operator reads and writes of each tensor."""
    rows: Any = (
        math.inf
    )  # the most that is touched of the first argument, where only some of its rows are
    if name in BAGS:
        rows = given["indices"].numel() * _bytes(given["weight"]) // max(1, len(given["weight"]))
    elif name in GATHERS:
        rows = out.nbytes
    elif name in SCATTERS:
        rows = next(given[key] for key in ("source", "values", "src") if key in given).nbytes
    for place, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not writes or (place == 0 and name not in OVERWRITES)
        for tensor in _tensors(given.get(argument.name)):
            size = _bytes(tensor) if place else min(rows, _bytes(tensor))
            yield size * reads, size * writes
    for result, returned in zip(out if isinstance(out, (tuple, list)) else [out], schema.returns):
        if returned.alias_info is None:
            yield from ((0, _bytes(tensor)) for tensor in _tensors(result))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """The memory behind a tensor: elements that an expanded dimension repeats count once."""
    sizes = (
        size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride())
    )
    return tensor.element_size() * math.prod(sizes)
