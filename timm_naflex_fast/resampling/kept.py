"""What is kept between calls, under one memory bound but for what CUDA graphs read.

- ``kept_by_arguments``: results that depend on the arguments alone (unit vectors, the taps of an
  axis, resize steps, pseudo-inverses).
- ``kept_of``: position tables and patch kernels resized from a library's parameters, for as long as
  the parameters hold the same bits. Those of a deleted model stay until the bound or ``clear_all``
  drops them.
- ``pinned``: what a CUDA graph reads stays in memory for good.

Dispatch modes watch operators: a selective checkpoint counts them, others change what they return.
So where one watches (``watched``) nothing is taken from here or put here: every call computes all
that it needs, in the same order.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``. Over it, what was not used for the longest
time goes first.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..tracing import in_cuda_graph
from .same_bits import Copy, copy_of, same_bits

Result = TypeVar("Result")
Sources = tuple[Tensor, ...]


@dataclass
class _OfSources:
    """What was made from some tensors, the sources, for as long as they hold these bits."""

    versions: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()  # of the sources, taken when the first table is made
    tables: dict[Hashable, Tensor | None] = field(default_factory=dict)
    """Resized ones by key. None: the key was met once."""


_limit = int(os.environ.get("TIMM_NAFLEX_FAST_CACHE_MIB") or 512) * 2**20
_lock = threading.RLock()
# (function, ...) to a result, (None, ...) to an _OfSources; the oldest use first.
_entries: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_nbytes = 0
_pinned: dict[int, Any] = {}  # what CUDA graphs read


def watched() -> bool:
    """Whether a mode watches this thread's operators: then nothing is taken or kept.

    A default device is a mode too, and harmless: what is built here names its devices.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def kept_by_arguments(function: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator: keep a function's results, tensors or tuples of tensors, by its arguments.

    Do not write to them.
    """

    @wraps(function)
    def call(*args: Hashable) -> Result:
        if watched():
            return function(*args)
        key = (function, *args)
        found: Result | None = _use(key)
        if found is None:
            with without_autograd():
                found = function(*args)
            _keep(_entries, key, found)
        return found

    return call


def pinned(result: Result, device: torch.device) -> Result:
    """``result``, which stays in memory for good where a CUDA graph is being captured.

    The graph keeps its address.
    """
    if in_cuda_graph(device):
        _pinned[id(result)] = result
    return result


def met_keys(sources: Sources) -> dict[Hashable, Tensor | None]:
    """The keys that were met with these sources, and what is kept for each; None: nothing yet.

    Callers enter the keys that they meet, and call :func:`kept_of` for those that they met before:
    a grid that never comes again would only cost memory, and to compare the bits of the sources
    costs time. The dictionary is empty where the sources have changed, as far as their versions
    tell: the weights of a teacher change in each step. So of a table that stays, the first call
    with a grid enters its key, the second keeps its embeddings, and later ones take them.
    """
    # An inference tensor has no version, so any constant will do.
    versions = tuple([True if source.is_inference() else source._version for source in sources])
    entry_key = _key_of(sources)
    entry: _OfSources | None = _use(entry_key)
    if entry is None or entry.versions != versions:
        entry = _OfSources(versions)
        _keep(_entries, entry_key, entry)
    return entry.tables


def kept_of(
    sources: Sources, keys: list[Hashable], resize: Callable[[Sources, Any], Tensor]
) -> Iterator[Tensor]:
    """For each key in turn the table that is kept, or a new one: ``resize(sources, key)``.

    The contents of the sources, on a CPU, are compared bit by bit on each call.
    """
    if watched():
        for key in keys:
            yield resize(sources, key)
        return
    entry_key = _key_of(sources)
    entry: _OfSources = _use(entry_key) or _OfSources()
    if not entry.copies or not all(map(same_bits, entry.copies, sources)):
        with without_autograd():
            copies = tuple(copy_of(source) for source in sources)
        entry = _OfSources(entry.versions, copies)
        _keep(_entries, entry_key, entry)
    for key in keys:
        table = entry.tables.get(key)
        if table is None:
            with without_autograd():
                # From the copies that are compared: another thread may write to the sources.
                table = resize(tuple(copy.tensor for copy in entry.copies), key)
                table = table.clone(memory_format=torch.contiguous_format)  # no view of a copy
            with _lock:
                if _use(entry_key) is entry:  # no other thread has replaced it
                    _keep(entry.tables, key, table)
        yield table


def forget(*sources: Tensor) -> None:
    """Drop what is kept of these sources: they are about to change."""
    global _nbytes
    with _lock:
        _nbytes -= _bytes_of(_entries.pop(_key_of(sources), None))


def clear_all() -> None:
    """Drop everything."""
    global _nbytes
    with _lock:
        _entries.clear()
        _nbytes = 0


@contextmanager
def without_autograd() -> Iterator[None]:
    """Build what is kept in this context: without inference mode, gradient or autocast.

    A kept inference tensor could not be used in training later.
    """
    on_cpu = torch.autocast("cpu", enabled=False)
    on_cuda = torch.autocast("cuda", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), on_cpu, on_cuda:
        yield


def _key_of(sources: Sources) -> tuple[Any, ...]:
    """By their ids: ``torch.utils.swap_tensors`` refuses tensors that have weak references."""
    return (None, *map(id, sources))


def _use(key: Any) -> Any:
    """An entry, which becomes the newest in use; None if there is none."""
    try:
        _entries.move_to_end(key)
        return _entries[key]
    except KeyError:  # or another thread has dropped it: the lock would cost more than all the rest
        return None


def _keep(entries: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep ``value`` among all entries, or among the tables of one; drop the oldest in use."""
    global _nbytes
    with _lock:
        _nbytes += _bytes_of(value) - _bytes_of(entries.pop(key, None))
        entries[key] = value
        while _nbytes > _limit and _entries:
            _, oldest = _entries.popitem(last=False)
            _nbytes -= _bytes_of(oldest)


def _bytes_of(value: Any) -> int:
    """About what it takes in memory; 0 for None."""
    if value is None:
        return 0
    if isinstance(value, _OfSources):
        copies = tuple(copy.tensor for copy in value.copies)
        return _bytes_of((*copies, *value.tables.values()))
    if isinstance(value, tuple):
        return 128 + sum(map(_bytes_of, value))
    return 256 + getattr(value, "nbytes", 0)
