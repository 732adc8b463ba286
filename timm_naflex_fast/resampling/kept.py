"""What is kept between calls, under one memory bound; what a CUDA graph reads stays in memory for
good.

- ``cached``: results that depend on the arguments alone (the taps of an axis, resize steps,
  pseudo-inverses).
- ``cached_resized``: position tables and patch kernels resized from a library's parameters, for as
  long as the parameters hold the same bits. Those of a deleted model stay until the bound or
  ``clear_all`` drops them.

Dispatch modes watch operators: a selective checkpoint counts them, others change what they return.
So where one watches (``watched``) nothing is taken from the cache or put there: every call computes
all that it needs, in the same order.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``. Over it, what was not used for the longest
time goes first.
"""

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..tracing import in_cuda_graph

Result = TypeVar("Result")
ENV_NAME = "TIMM_NAFLEX_FAST_CACHE_MIB"


def read_limit(text: str | None) -> int:
    """The bound in bytes, from what ``TIMM_NAFLEX_FAST_CACHE_MIB`` holds; unset or empty is 512
    MiB.

    Raises:
        ValueError: anything but a whole number of MiB, 0 or more.
    """
    text = (text or "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{ENV_NAME}={text!r} is not valid; valid: a whole number of MiB, 0 or more, or nothing (512)"
        )
    return int(text or 512) * 2**20


class _Copy(NamedTuple):
    tensor: Tensor
    memory: bytearray  # that the tensor lives in


@dataclass
class _Resized:
    """What was made from some parameters, as long as they hold these bits."""

    versions: tuple[int, ...] = ()
    copies: tuple[_Copy, ...] = ()  # taken when the first resized one is made
    made: OrderedDict[Hashable, Tensor | None] = field(
        default_factory=OrderedDict
    )  # oldest use first


_limit = read_limit(os.environ.get(ENV_NAME))
_lock = threading.RLock()
_entries: OrderedDict[tuple[Any, ...], Any] = (
    OrderedDict()
)  # (kind, ...) to a result or a _Resized, oldest use first
_nbytes = 0
_pinned: dict[int, Any] = {}  # what CUDA graphs read
RESIZED = "resized tables and kernels"


def hold_over_fork(lock: Any) -> None:
    """Hold ``lock`` around ``fork()``; otherwise another thread's lock stays locked in the child
    for ever."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


hold_over_fork(_lock)


def watched() -> bool:
    """Whether a dispatch mode watches this thread's operators: then nothing is taken from the cache
    or put there.

    A default device is a mode too, and harmless: what is built here names its devices.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def cached(kind: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A decorator: keep a function's results, tensors or tuples of tensors, by its arguments. Do
    not write to them."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def call(*args: Hashable) -> Result:
            if watched():
                return function(*args)
            key = (kind, *args)
            found = _get(_entries, key)
            if found is None:
                with without_autograd():
                    found = (function(*args),)  # a tuple, so that None can be kept
                _keep(key, found)
            return found[0]

        return call

    return decorate


def pinned(result: Result, device: torch.device) -> Result:
    """``result``; it stays in memory for good where a CUDA graph is being captured, which keeps its
    address."""
    if in_cuda_graph(device):
        _pinned[id(result)] = result
    return result


def resized_by_key(sources: tuple[Tensor, ...]) -> OrderedDict[Hashable, Tensor | None]:
    """The resized tables of these sources by key; None marks a key that was seen once, whose table
    is not made yet.

    Callers enter the keys that they see, and call :func:`cached_resized` for those that they have
    seen before: a grid that never comes again would only cost memory, and to compare the bits of
    the sources costs time. The dictionary is empty where the sources have changed, as far as their
    versions tell.
    """
    versions: tuple[int, ...] = ()
    for source in sources:
        versions += (source.is_inference() or source._version,)
    parameters = (RESIZED, *map(id, sources))
    entry = _entries.get(parameters)
    if entry is None or entry.versions != versions:
        if entry is not None and not entry.copies:  # nothing was made: only the keys are forgotten
            entry.versions, entry.made = versions, OrderedDict()
            return entry.made
        entry = _Resized(versions)
        _keep(parameters, entry)
    return entry.made


def cached_resized(
    sources: tuple[Tensor, ...],
    keys: list[Hashable],
    build: Callable[[tuple[Tensor, ...], Any], Tensor],
) -> Iterator[Tensor]:
    """The table for each key in turn: a cached one, or ``build(copies of the sources, key)`` if the
    bits differ.

    The contents of the sources, on a CPU, are compared bit by bit on each call. Their version
    counters and addresses do not change when somebody writes to ``.data``; and
    ``torch.utils.swap_tensors`` refuses tensors that have weak references, so an entry is found by
    the ids of its sources. What is built comes from the copies that are compared: another thread
    may write to the sources meanwhile.
    """
    if watched():
        yield from map(partial(build, sources), keys)
        return
    parameters = (RESIZED, *map(id, sources))
    entry = _get(_entries, parameters)
    if entry is None or not entry.copies or not all(map(_same_bits, entry.copies, sources)):
        with without_autograd():
            copies = tuple(_copy(source) for source in sources)
        entry = _Resized(
            () if entry is None else entry.versions, copies
        )  # start over: the sources have changed
        _keep(parameters, entry)
    for key in keys:
        table = _get(entry.made, key)
        if table is None:
            with without_autograd():
                table = build(tuple(copy.tensor for copy in entry.copies), key)
                # It may be a view of a copy.
                table = table.clone(memory_format=torch.contiguous_format)
            _add(parameters, entry, key, table)
        yield table


def invalidate(*sources: Tensor) -> None:
    """Drop what is cached of these sources: they are about to change."""
    global _nbytes
    parameters = (RESIZED, *map(id, sources))
    if parameters in _entries:
        with _lock:
            _nbytes -= _bytes_of(_entries.pop(parameters, None))


def clear_all() -> None:
    """Drop everything."""
    global _nbytes
    with _lock:
        _entries.clear()
        _nbytes = 0


def stats() -> tuple[dict[str, int], int, int]:
    """How many entries of each kind are cached, the bytes of all together, and the bound in
    bytes."""
    with _lock:
        counts: Counter[str] = Counter()
        # By dict's own views: other threads move what they use, without the lock, while keys are
        # hashed in Python.
        for (kind, *_), value in list(dict.items(_entries)):
            made = list(dict.values(value.made)) if isinstance(value, _Resized) else [value]
            counts[kind] += sum(table is not None for table in made)
        return dict(+counts), _nbytes, _limit


def report() -> str:
    """One line: what is cached at present, and the bound."""
    counts, nbytes, limit = stats()
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    return f"{nbytes / 2**20:.1f} of {limit / 2**20:.0f} MiB cached" + (
        f": {kinds}" if kinds else ""
    )


@contextmanager
def without_autograd() -> Iterator[None]:
    """Build what is cached in this context: without inference mode, gradient or autocast.

    A cached inference tensor could not be used in training later.
    """
    off = partial(torch.autocast, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), off("cpu"), off("cuda"):
        yield


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


def _add(parameters: tuple[Any, ...], entry: _Resized, key: Hashable, table: Tensor | None) -> None:
    global _nbytes
    with _lock:
        if _entries.get(parameters) is entry:  # else another thread has replaced it
            _nbytes += _bytes_of(table) - _bytes_of(entry.made.pop(key, None))
            entry.made[key] = table
            _entries.move_to_end(parameters)
            _shrink()


def _shrink() -> None:
    global _nbytes
    while _nbytes > _limit and _entries:
        key, value = next(iter(_entries.items()))
        if isinstance(value, _Resized) and value.made:
            _nbytes -= _bytes_of(value.made.pop(next(iter(value.made))))
        else:
            _nbytes -= _bytes_of(_entries.pop(key))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes + 256
    if isinstance(value, _Resized):
        return _bytes_of((*(copy.tensor for copy in value.copies), *dict.values(value.made)))
    if isinstance(value, tuple):
        return 128 + sum(map(_bytes_of, value))
    return 0 if value is None else getattr(value, "nbytes", 64)


def _copy(source: Tensor) -> _Copy:
    source = source.detach().resolve_neg().contiguous()
    memory = bytearray(source.as_strided((source.numel(),), (1,)).view(torch.uint8).numpy())
    return _Copy(
        torch.frombuffer(memory, dtype=source.dtype).view(source.shape)
        if memory
        else source.clone(),
        memory,
    )


def _same_bits(before: _Copy, now: Tensor) -> bool:
    """Whether a tensor holds the same bits as before."""
    copy, memory = before
    if copy.shape != now.shape or copy.dtype != now.dtype:
        return False
    # One axis first: an axis of length 1 may have any stride, and PyTorch then finds no bytes. Of
    # all that Python has, only ``startswith`` compares memory as it stands, twice as fast as NumPy.
    now = now.detach().resolve_neg().contiguous()
    bits: Any = now.as_strided((now.numel(),), (1,)).view(torch.uint8).numpy()
    return memory.startswith(bits)
