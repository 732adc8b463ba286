"""What is cached between calls, under one memory bound; what a CUDA graph reads stays in memory for good.

- ``cached``: results that depend on the arguments alone (resize steps, axis sums, pseudo-inverses).
- ``cached_by_bits``: the groups of a batch, for as long as its coordinates hold the same bits.
- ``cached_resized``: position tables and patch kernels resized from a library's parameters, for as long as the
  parameters hold the same bits. Those of a deleted model stay until the bound or ``clear_all`` drops them.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``. Over it, what was not used for the longest time goes first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..tracing import in_cuda_graph

Result = TypeVar("Result")
VARIABLE = "TIMM_NAFLEX_FAST_CACHE_MIB"


def read_limit(text: str | None) -> int:
    """The bound in bytes, from what ``TIMM_NAFLEX_FAST_CACHE_MIB`` holds; unset or empty is 512 MiB.

    Raises:
        ValueError: anything but a whole number of MiB, 0 or more.
    """
    text = (text or "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{VARIABLE}={text!r} is not valid; valid: a whole number of MiB, 0 or more, or nothing (512)")
    return int(text or 512) * 2**20


@dataclass
class _Frozen:
    """What was made from some parameters, as long as they hold these bits."""

    versions: tuple[int, ...]
    bits: tuple[Tensor, ...] = ()  # copies, taken when the first resized one is made
    made: OrderedDict[Hashable, Tensor] = field(default_factory=OrderedDict)  # oldest use first


_limit = read_limit(os.environ.get(VARIABLE))
_lock = threading.RLock()
_entries: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # (kind, ...) to a result or a _Frozen, oldest use first
_nbytes = 0
_pinned: dict[int, Any] = {}  # what CUDA graphs read


def hold_over_fork(lock: Any) -> None:
    """Hold ``lock`` around ``fork()``; otherwise another thread's lock stays locked in the child for ever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


hold_over_fork(_lock)


def cached(kind: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A decorator: keep a function's results, tensors or tuples of tensors, by its arguments. Do not write to them."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def call(*args: Hashable) -> Result:
            key = (kind, *args)
            found = _get(_entries, key)
            if found is None:
                with no_modes():
                    found = (function(*args),)  # a tuple, so that None can be kept
                _keep(key, found)
            return found[0]

        return call

    return decorate


def pinned(result: Result, device: torch.device) -> Result:
    """``result``; it stays in memory for good where a CUDA graph is being captured, which keeps its address."""
    if in_cuda_graph(device):
        _pinned[id(result)] = result
    return result


def cached_by_bits(kind: str, source: Tensor, key: Hashable, build: Callable[[], Result]) -> Result:
    """``build()``, or its last result if ``source`` has the same bits as then. One is kept for each shape and key."""
    full_key = (kind, source.shape, source.dtype, key)
    found = _get(_entries, full_key)
    if found is not None and _same_bits(found[0], source):
        return found[1]
    with no_modes():
        bits = source.detach().clone()
    with torch.inference_mode(False):
        result = build()
    _keep(full_key, (bits, result))
    return result


def seen_before(sources: tuple[Tensor, ...]) -> bool:
    """Whether these sources were asked for before and, as far as their version counters tell, not changed since.

    Ask it before :func:`cached_resized` for a position table: one that nobody uses again would only cost memory.
    """
    versions: tuple[int, ...] = ()
    for source in sources:
        versions += (0 if source.is_inference() else source._version,)
    key = ("resized tables and kernels", *map(id, sources))
    entry = _entries.get(key)
    if entry is not None and entry.versions == versions:
        return True
    _keep(key, _Frozen(versions))
    return False


def cached_resized(
    sources: tuple[Tensor, ...],
    sizes: list[tuple[int, int]],
    key: Hashable,
    build: Callable[[tuple[Tensor, ...], tuple[int, int]], Tensor],
) -> Iterator[Tensor]:
    """The table for each size in turn: a cached one, or ``build(copies of the sources, size)`` if the bits differ.

    The contents of the sources are compared bit by bit on each call. Their version counters and addresses do not
    change when somebody writes to ``.data``, and a weak reference to a parameter would forbid PyTorch to swap it. What
    is built comes from the copies that are compared: another thread may write to the sources meanwhile.
    """
    parameters = ("resized tables and kernels", *map(id, sources))
    entry = _get(_entries, parameters)
    if entry is None or not entry.bits or not all(map(_same_bits, entry.bits, sources)):
        with no_modes():
            bits = tuple(source.detach().clone() for source in sources)
        entry = _Frozen(() if entry is None else entry.versions, bits)
        _keep(parameters, entry)
    for size in sizes:
        table = _get(entry.made, (size, key))
        if table is None:
            with no_modes():
                table = build(entry.bits, size).contiguous()
                if any(table.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in entry.bits):
                    table = table.clone()
            _add(parameters, entry, (size, key), table)
        yield table


def invalidate(*sources: Tensor) -> None:
    """Drop what is cached of these sources: they are about to change."""
    global _nbytes
    with _lock:
        _nbytes -= _bytes_of(_entries.pop(("resized tables and kernels", *map(id, sources)), None))


def clear_all() -> None:
    """Drop everything."""
    global _nbytes
    with _lock:
        _entries.clear()
        _nbytes = 0


def stats() -> tuple[dict[str, int], int, int]:
    """How many entries of each kind are cached, the bytes of all together, and the bound in bytes."""
    with _lock:
        counts: Counter[str] = Counter()
        for (kind, *_), value in _entries.items():
            counts[kind] += len(value.made) if isinstance(value, _Frozen) else 1
        return dict(+counts), _nbytes, _limit


def report() -> str:
    """One line: what is cached at present, and the bound."""
    counts, nbytes, limit = stats()
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    return f"{nbytes / 2**20:.1f} of {limit / 2**20:.0f} MiB cached" + (f": {kinds}" if kinds else "")


def no_modes() -> ExitStack:
    """Build what is cached in this context: no inference mode, gradient, autocast or dispatch mode.

    A cached inference tensor could not be used in training later, and a fake one, of a tracer, never. The caller's
    default device stays: name a device wherever you make a tensor. (``torch.device`` as a context costs 3 us a call.)
    """
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _get(entries: OrderedDict[Any, Any], key: Any) -> Any:
    """An entry, which becomes the newest in use; None if there is none."""
    try:
        entries.move_to_end(key)
        return entries[key]
    except KeyError:  # or another thread has dropped it: the lock would cost more than all the rest
        return None


def _keep(key: tuple[Any, ...], value: Any) -> None:
    global _nbytes
    with _lock:
        _nbytes += _bytes_of(value) - _bytes_of(_entries.pop(key, None))
        _entries[key] = value
        _shrink()


def _add(parameters: tuple[Any, ...], entry: _Frozen, key: Hashable, table: Tensor) -> None:
    global _nbytes
    with _lock:
        if _entries.get(parameters) is entry:  # else another thread has replaced it
            _nbytes += _bytes_of(table) - _bytes_of(entry.made.get(key))
            entry.made[key] = table
            _entries.move_to_end(parameters)
            _shrink()


def _shrink() -> None:
    global _nbytes
    while _nbytes > _limit and _entries:
        key, value = next(iter(_entries.items()))
        if isinstance(value, _Frozen) and value.made:
            _nbytes -= _bytes_of(value.made.popitem(last=False)[1])
        else:
            _nbytes -= _bytes_of(_entries.pop(key))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes + 256  # pragma: no mutate: an estimate
    if isinstance(value, _Frozen):
        return _bytes_of((*value.bits, *value.made.values()))
    if isinstance(value, tuple):
        return 128 + sum(map(_bytes_of, value))
    return 64 if value is not None else 0


def _same_bits(before: Tensor, now: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if before.shape != now.shape or before.dtype != now.dtype or before.device != now.device:
        return False
    if _memcmp is not None and now.is_cpu and before.is_contiguous() and now.is_contiguous() and not now.is_neg():
        return _memcmp(before.data_ptr(), now.data_ptr(), before.nbytes) == 0
    before, now = before.resolve_neg(), now.detach().resolve_neg()
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[now.element_size()]
    return torch.equal(before.view(as_int), now.view(as_int))


# C's own comparison of memory takes two thirds of the time of ``torch.equal`` (786 kB, the table of 16 x 16 cells).
_memcmp = getattr(ctypes.CDLL(None), "memcmp", None) if os.name == "posix" else None
if _memcmp is not None:
    _memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
