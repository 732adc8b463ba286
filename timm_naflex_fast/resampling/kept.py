"""What is kept between calls, in one dictionary under one memory bound.

- ``kept_by_arguments``: results that depend on the arguments alone (unit vectors, the taps of an
  axis, resize steps, pseudo-inverses).
- ``kept_of_sources``: what is computed from a library's parameters, the sources (position tables,
  patch kernels), for as long as they hold the same bits.
- ``pinned``: what a CUDA graph reads stays in memory for good, outside of the bound.

The same source is a tensor with the same place in memory, dtype, shape and strides: a compiled
graph and a library's view make a new tensor for one parameter in each call. What lies there may
have changed, also unseen by PyTorch's version counter, so its contents are compared bit by bit.

Dispatch modes watch operators: a selective checkpoint counts them, others change what they return.
What they see must not depend on what is kept. So results by arguments are computed out of their
sight, and where one watches (``watched``) nothing of a source is taken or kept.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``. Over it, what was not used for the longest
time goes first. Entries of a deleted model stay until then, or until ``clear_all``.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..tracing import in_cuda_graph

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Sources = tuple[Tensor, ...]

# What an object costs beside its numbers, in bytes, as the growth of a process shows
# (tests/resampling/test_kept.py): an entry with its key, and a tensor or an array.
ENTRY_BYTES = 704
TENSOR_BYTES = 768


@dataclass
class _Entry:
    """One entry of the dictionary."""

    nbytes: int  # about what it takes in memory
    result: Any = None  # by arguments
    # Of sources:
    versions: tuple[int, ...] = ()
    copies: tuple[bytearray, ...] = ()  # the bytes that they held; at first none
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)


_mib = os.environ.get("TIMM_NAFLEX_FAST_CACHE_MIB") or "512"
if not _mib.isdecimal():
    raise ValueError(f"TIMM_NAFLEX_FAST_CACHE_MIB must be a whole number of MiB; got {_mib[:40]!r}")
_limit = int(_mib) * 2**20  # in bytes
# For whoever writes to the two that follow. Re-entrant: a signal handler may run a model meanwhile.
_lock = threading.RLock()
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # the oldest use first
_nbytes = 0
_pinned: dict[int, Any] = {}  # what CUDA graphs read
if hasattr(os, "register_at_fork"):  # a child gets no lock that a thread of its parent holds
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def watched() -> bool:
    """Whether a mode watches this thread's operators: then nothing of a source is taken or kept.

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
        key = (function, *args)
        entry = _use(key)
        if entry is None:
            with unseen():
                result = function(*args)
            entry = _Entry(ENTRY_BYTES + _bytes_of(result), result)
            _keep(key, entry)
        kept: Result = entry.result
        return kept

    return call


def pinned(result: Result, device: torch.device) -> Result:
    """``result``, which stays in memory for good where a CUDA graph is being captured.

    The graph keeps its address.
    """
    if in_cuda_graph(device):
        _pinned[id(result)] = result
    return result


def kept_of_sources(
    sources: Sources,
    keys: Iterable[Key],
    make: Callable[[Sources, Iterable[Key]], Iterable[tuple[Key, Tensor]]],
    options: Hashable = None,
) -> Iterable[tuple[Key, Tensor]]:
    """The tensors of some keys, each with its key: what is kept, and the rest from ``make``.

    The first call with these contents keeps nothing: the weights of a teacher change in each step.
    The second copies the sources, and from then on what is made is kept.

    Args:
        sources: on a CPU.
        keys: of the tensors.
        make: ``make(sources, keys)`` computes those of the keys that are missing.
        options: what else the tensors depend on.
    """
    entry = _entry_of(sources)
    if entry is None:
        return make(sources, keys)
    found = []
    missing = []
    for key in keys:
        tensor = entry.tensors.get((key, options))
        if tensor is None:
            missing.append(key)
        else:
            found.append((key, tensor))
    if missing:
        with unseen():
            # From the copies that are compared: another thread may write to the sources.
            copies = tuple(map(_tensor_in, entry.copies, sources))
            for key, tensor in make(copies, missing):
                # A part of something larger would keep all of it in memory.
                if tensor.untyped_storage().nbytes() > tensor.nbytes:
                    tensor = tensor.clone(memory_format=torch.contiguous_format)
                _keep_tensor(_place(sources), entry, (key, options), tensor)
                found.append((key, tensor))
    return found


def forget(sources: Sources) -> None:
    """Drop what is kept of these sources: they are about to change, and training needs memory."""
    with _lock:
        _drop(_place(sources))


def clear_all() -> None:
    """Drop everything."""
    with _lock:
        for key in list(_entries):
            _drop(key)


@contextmanager
def unseen() -> Iterator[None]:
    """Compute what is kept in this context: out of the sight of modes, autograd and autocast.

    A kept inference tensor could not be used in training later.
    """
    no_functions = torch._C.DisableTorchFunction()
    no_operators = torch._C._DisableTorchDispatch()
    on_cpu = torch.autocast("cpu", enabled=False)
    on_cuda = torch.autocast("cuda", enabled=False)
    with no_functions, no_operators, torch.inference_mode(False), torch.no_grad(), on_cpu, on_cuda:
        yield


def _entry_of(sources: Sources) -> _Entry | None:
    """The entry of these sources, with copies of what they hold; None in the first call with that."""
    # An inference tensor has no version, so any constant will do.
    versions = tuple(0 if source.is_inference() else source._version for source in sources)
    place = _place(sources)
    entry = _use(place)
    # As far as the versions tell, which cost nothing.
    if entry is None or entry.versions != versions:
        _keep(place, _Entry(ENTRY_BYTES, versions=versions))
        return None
    if not entry.copies:
        with unseen():
            copies = tuple(bytearray(_bytes(source)) for source in sources)
        nbytes = ENTRY_BYTES + sum(TENSOR_BYTES + len(copy) for copy in copies)
        entry = _Entry(nbytes, None, versions, copies)
        _keep(place, entry)
        return entry
    for copy, source in zip(entry.copies, sources):
        if copy != memoryview(_bytes(source)):
            _keep(place, _Entry(ENTRY_BYTES, versions=versions))
            return None
    return entry


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor, cell after cell, as NumPy's array; of a copy if need be.

    Python compares two buffers as they stand in memory: a table of 16 x 16 x 768 in 20 us, where
    ``torch.equal`` takes 70 us on integers, and an operator of NumPy's writes a result first.
    """
    tensor = tensor.detach().contiguous()
    # One axis first: an axis of length 1 may have any stride, and PyTorch then finds no bytes.
    line = tensor.as_strided((tensor.numel(),), (1,))
    return line.view(torch.uint8).numpy()


def _tensor_in(copy: bytearray, like: Tensor) -> Tensor:
    """The tensor whose bytes these are, in that memory if its layout is the usual one."""
    tensor = torch.frombuffer(copy, dtype=like.dtype).view(like.shape)
    if like.is_contiguous():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _place(sources: Sources) -> Hashable:
    """Where the sources lie in memory, and how."""
    return tuple(
        (source.data_ptr(), source.dtype, source.shape, source.stride()) for source in sources
    )


def _use(key: Hashable) -> _Entry | None:
    """An entry, which becomes the newest in use; None if there is none."""
    try:
        _entries.move_to_end(key)
        return _entries[key]
    except KeyError:  # or another thread has dropped it: the lock would cost more than all the rest
        return None


def _keep(key: Hashable, entry: _Entry) -> None:
    """Put an entry in place of an older one, and drop the oldest in use."""
    global _nbytes
    with _lock:
        _drop(key)
        _entries[key] = entry
        _nbytes += entry.nbytes
        # What was just put in may go as well.
        while _nbytes > _limit and _entries:
            _drop(next(iter(_entries)))


def _keep_tensor(place: Hashable, entry: _Entry, key: Hashable, tensor: Tensor) -> None:
    """Put a tensor into an entry of sources, unless another thread has replaced the entry."""
    with _lock:
        if _entries.get(place) is entry and key not in entry.tensors:
            _drop(place)
            entry.tensors[key] = tensor
            entry.nbytes += _bytes_of(tensor)
            _keep(place, entry)


def _drop(key: Hashable) -> None:
    """Drop an entry, if there is one."""
    global _nbytes
    entry = _entries.pop(key, None)
    if entry is not None:
        _nbytes -= entry.nbytes


def _bytes_of(value: Any) -> int:
    """About what a result takes in memory: a tensor, an array, a tuple of them, or something small."""
    if isinstance(value, tuple):
        return sum(map(_bytes_of, value))
    return TENSOR_BYTES + getattr(value, "nbytes", 0)
