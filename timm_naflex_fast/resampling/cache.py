"""What is kept between calls: plans, matrices, finished tables. One memory bound for all of it, oldest use out first.

``kept`` wraps a function whose result depends on its arguments alone. ``finished`` keeps tables that were made from a
library's parameters, for as long as the parameters hold the same bits.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from functools import wraps
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Result = TypeVar("Result")

_limit = int(os.environ.get("TIMM_NAFLEX_FAST_CACHE_MIB", 512)) * 2**20
_lock = threading.RLock()
_entries: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # (kind, ...) to what is kept, oldest use first
_nbytes = 0
_generations = count()


def hold_over_fork(lock: Any) -> None:
    """Hold ``lock`` around ``fork()``; otherwise another thread's lock stays locked in the child for ever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


hold_over_fork(_lock)


def kept(kind: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A decorator: keep a function's results, tensors or tuples of tensors, by its arguments. Do not write to them."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def call(*args: Hashable) -> Result:
            key = (kind, *args)
            found = _look_up(key)
            if found is None:
                with plainly():
                    found = (function(*args),)  # a tuple, so that None can be kept
                _keep(key, found)
            return found[0]

        return call

    return decorate


def finished(
    sources: tuple[Tensor, ...],
    sizes: list[tuple[int, int]],
    how: Hashable,
    build: Callable[[tuple[int, int]], Tensor],
) -> Iterator[Tensor]:
    """The table for each size in turn: a kept one, or ``build(size)`` where ``sources`` hold other bits than before.

    The contents of the sources are compared bit by bit on each call. Their version counters and addresses do not
    change when somebody writes to ``.data``, and a weak reference to a parameter would forbid PyTorch to swap it.
    """
    source = ("sources", *map(id, sources))
    with _lock:
        generation, contents, keys = _look_up(source) or (0, (), dict[tuple[Any, ...], None]())
        if not contents or not all(map(_same_bits, contents, sources)):
            _drop(source)
            with plainly():
                contents = tuple(tensor.detach().clone() for tensor in sources)
            generation, keys = next(_generations), {}
            _keep(source, (generation, contents, keys))
    for size in sizes:
        key = ("finished tables", generation, size, how)
        table = _look_up(key)
        if table is None:
            with plainly():
                table = build(size).contiguous()
            keys[key] = None  # dropped together with the contents
            _keep(key, table)
        _look_up(source)  # used as recently as its table
        yield table


def unchanged(sources: tuple[Tensor, ...]) -> bool:
    """Whether these sources were asked for before and, as far as their version counters tell, not changed since.

    Ask it before :func:`finished`: a finished table that nobody uses again would only cost memory.
    """
    key = ("versions", *map(id, sources))
    versions = tuple(0 if source.is_inference() else source._version for source in sources)
    before = _look_up(key)
    if before != versions:
        _keep(key, versions)
        if before is not None:
            _drop(("sources", *map(id, sources)))
    return before == versions


def forget(*sources: Tensor) -> None:
    """Drop what is kept of these sources: they are about to change."""
    for kind in ("versions", "sources"):
        _drop((kind, *map(id, sources)))


def clear_all() -> None:
    """Drop everything."""
    global _nbytes
    with _lock:
        _entries.clear()
        _nbytes = 0


def usage() -> tuple[dict[str, int], int, int]:
    """How many entries of each kind are kept, the bytes of all together, and the bound in bytes."""
    with _lock:
        counts: dict[str, int] = {}
        for kind, *_ in _entries:
            counts[kind] = counts.get(kind, 0) + 1
        return counts, _nbytes, _limit


def report() -> str:
    """One line: what is kept at present, and the bound."""
    counts, nbytes, limit = usage()
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()) if kind not in ("versions", "sources"))
    return f"{nbytes / 2**20:.1f} of {limit / 2**20:.0f} MiB kept" + (f": {kinds}" if kinds else "")


def plainly() -> ExitStack:
    """Build what is kept in this context: no inference mode, gradient, autocast or dispatch mode.

    A kept inference tensor could not be used in training later, and a fake one, of a tracer, never. The caller's
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


def _look_up(key: tuple[Any, ...]) -> Any:
    value = _entries.get(key)
    if value is not None:
        try:
            _entries.move_to_end(key)
        except KeyError:  # without the lock, which would cost more than all the rest: another thread has dropped it
            pass
    return value


def _keep(key: tuple[Any, ...], value: Any) -> None:
    global _nbytes
    with _lock:
        _drop(key)
        _entries[key] = value
        _nbytes += _bytes_of(value)
        _shrink()


def _drop(key: tuple[Any, ...]) -> None:
    global _nbytes
    with _lock:
        value = _entries.pop(key, None)
        _nbytes -= _bytes_of(value)
        if key[0] == "sources" and value is not None:
            for table in list(value[2]):
                _drop(table)


def _shrink() -> None:
    while _nbytes > _limit and _entries:
        _drop(next(iter(_entries)))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes + 256
    if isinstance(value, tuple):
        return 128 + sum(map(_bytes_of, value))
    return 64 if value is not None else 0


def _same_bits(kept_: Tensor, now: Tensor) -> bool:
    if kept_.shape != now.shape or kept_.dtype != now.dtype or kept_.device != now.device:
        return False
    return torch.equal(*_as_integers(kept_, now.detach()))


def _as_integers(*tensors: Tensor) -> list[Tensor]:
    """Views on the same bits as integers, the widest possible: comparing takes time by the number of elements."""
    size = tensors[0].element_size()
    if all(t.is_contiguous() and t.numel() * size % 8 == 0 and t.storage_offset() * size % 8 == 0 for t in tensors):
        return [t.view(-1).view(torch.int64) for t in tensors]
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return [t.view(as_int) for t in tensors]
