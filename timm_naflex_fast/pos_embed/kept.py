"""What is kept between calls, in one dictionary under one memory bound.

- ``kept_by_arguments``: results that depend on the arguments alone (the taps of an axis, resize
  steps, pseudo-inverses).
- ``frozen``: a library's parameters, the sources (position tables, patch kernels), for as long as
  they hold the same bits. What is computed from them is kept by this argument, from the second
  time that a size is asked for: one that never comes again costs neither memory nor a comparison.

The same source is a tensor with the same place in memory, dtype, shape and strides: a compiled
graph and a library's view make a new tensor for one parameter in each call. What lies there may
have changed, also unseen by PyTorch's version counter, so its contents are compared bit by bit.

Dispatch modes watch operators: a selective checkpoint counts them, others change what they return.
What they see must not depend on what is kept. So results by arguments are computed out of their
sight, and where one watches (``tracing.watcher``) nothing of a source is taken or kept.

The bound is 512 MiB, or ``TIMM_NAFLEX_FAST_CACHE_MIB``. Over it, what was not used for the longest
time goes first. Entries of a deleted model stay until then, or until ``clear_all``.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .table import Size

Result = TypeVar("Result")
Sources = tuple[Tensor, ...]
Key = tuple[Hashable, ...]

# What an object costs beside its numbers, in bytes, as the growth of a process shows
# (tests/pos_embed/test_kept.py): an entry with its key, and a tensor or an array.
ENTRY_BYTES = 96
TENSOR_BYTES = 640


@dataclass(eq=False)
class Frozen:
    """Sources whose bits are known. Results are kept by it, as by any other argument."""

    versions: list[int]
    met: set[Size]  # the sizes that were asked for
    copies: Sequence[bytearray] = ()  # the bytes of the sources; at first none
    tensors: Sources = ()  # the sources, in that memory: another thread may write to the sources

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(map(len, self.copies))


_mib = os.environ.get("TIMM_NAFLEX_FAST_CACHE_MIB") or "512"
if not _mib.isdecimal():
    raise ValueError(f"TIMM_NAFLEX_FAST_CACHE_MIB must be a whole number of MiB; got {_mib[:40]!r}")
_limit = int(_mib) * 2**20  # in bytes
# For whoever writes to the two that follow. Re-entrant: a signal handler may run a model meanwhile.
_lock = threading.RLock()
# Results with the bytes that each takes, the oldest use first.
# Other threads take and reorder entries without the lock, so loops go over a copy of the keys.
_entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
_nbytes = 0
if hasattr(os, "register_at_fork"):  # a child gets no lock that a thread of its parent holds
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def kept_by_arguments(function: Callable[..., Result]) -> Callable[..., Result]:
    """A decorator: keep a function's results, tensors or tuples of tensors, by its arguments.

    Do not write to them. TorchDynamo cannot look into what is kept: its graphs compute them in
    every call. (Constants by ``assume_constant_result`` exclude dynamic sizes, and break torch 2.4
    on a second call in one graph.)
    """

    @wraps(function)
    def call(*args: Hashable) -> Result:
        if torch.compiler.is_dynamo_compiling():
            return function(*args)
        key = (function, *args)
        result: Result | None = use(key)
        if result is None:
            with unseen():
                result = function(*args)
            keep(key, result)
        return result

    return call


def use(key: Key) -> Any:
    """What is kept there, which becomes the newest in use; None if there is nothing."""
    try:
        _entries.move_to_end(key)
        result, _ = _entries[key]
    except KeyError:  # or another thread has dropped it: the lock would cost more than all the rest
        return None
    return result


def keep(key: Key, result: Any) -> None:
    """Keep a result in place of an older one, and drop the oldest in use. Do not write to it.

    Where another thread drops its sources meanwhile, it stays, unused, until it is the oldest.
    """
    global _nbytes
    nbytes = ENTRY_BYTES + _bytes_of(result)
    with _lock:
        _drop(key)
        _entries[key] = result, nbytes
        _nbytes += nbytes
        # What was just put in may go as well.
        while _nbytes > _limit and _entries:
            oldest, *_ = _entries
            _drop(oldest)


def frozen(sources: Sources, sizes: Collection[Size]) -> Frozen | None:
    """What results of these sources, on a CPU, are kept by, as long as they have the same bits.

    None if none of the sizes came before with these contents: a size may never come again, and the
    weights of a teacher change in each step. The second call copies the sources.
    """
    versions = []
    place: Key = ()
    for source in sources:
        # An inference tensor has no version, so any constant will do.
        versions.append(0 if source.is_inference() else source._version)
        place += (source.data_ptr(), source.dtype, source.shape, source.stride())
    known: Frozen | None = use(place)
    # As far as the versions tell, which cost nothing; then bit by bit.
    if known is not None and known.versions == versions:
        if known.met.isdisjoint(sizes):
            known.met.update(sizes)
            return None
        contents = []
        lines = []
        for source in sources:
            content = source.detach().resolve_neg()
            contents.append(content)
            lines.append(_bytes(content))
        if not known.copies:
            copies = [bytearray(line) for line in lines]
            known = Frozen(versions, known.met, copies, _copied(contents, copies))
            keep(place, known)
            return known
        if known.copies == lines:
            return known
    keep(place, Frozen(versions, set(sizes)))
    return None


def clear_all() -> None:
    """Drop everything."""
    with _lock:
        for key in list(_entries):
            _drop(key)


@contextmanager
def unseen() -> Iterator[None]:
    """Compute what is kept in this context: out of the sight of modes.

    A kept inference tensor could not be used in training later. Autocast may be on: it rounds
    nothing that this package computes.
    """
    no_functions = torch._C.DisableTorchFunction()
    no_operators = torch._C._DisableTorchDispatch()
    with no_functions, no_operators, torch.inference_mode(False):
        yield


def _bytes(tensor: Tensor) -> memoryview:
    """The memory from a tensor's first number to its last.

    Python compares two buffers as they stand in memory: a table of 16 x 16 x 768 in 20 us, where
    ``torch.equal`` takes 70 us on integers, and an operator of NumPy's writes a result first.
    """
    last = 0
    for n, stride in zip(tensor.shape, tensor.stride()):
        last += (n - 1) * stride
    line = tensor.as_strided((last + 1,), (1,))
    array: Any = line.view(torch.uint8).numpy()
    return memoryview(array)


def _copied(tensors: Sequence[Tensor], copies: Sequence[bytearray]) -> Sources:
    """Tensors like these, in the memory of their copies."""
    copied = []
    with unseen():
        for tensor, copy in zip(tensors, copies):
            line = torch.frombuffer(copy, dtype=tensor.dtype)
            copied.append(line.as_strided(tensor.shape, tensor.stride()))
    return tuple(copied)


def _drop(key: Key) -> None:
    """Drop what is kept there, if there is something; of sources, with all that was made of them."""
    global _nbytes
    result, nbytes = _entries.pop(key, (None, 0))
    _nbytes -= nbytes
    # Nothing is made of sources before they are copied; a moving table has one such entry a step.
    if isinstance(result, Frozen) and result.copies:
        for made in list(_entries):
            if result in made:
                _drop(made)


def _bytes_of(value: Any) -> int:
    """About what a result takes in memory: a tensor, an array, a tuple of them, or something small."""
    if isinstance(value, tuple):
        return sum(map(_bytes_of, value))
    return TENSOR_BYTES + getattr(value, "nbytes", 0)
