"""What is kept between calls, under one memory bound but for what CUDA graphs read.

- ``kept_by_arguments``: results that depend on the arguments alone (unit vectors, the taps of an
  axis, resize steps, pseudo-inverses).
- ``embeddings``, ``kept_of``: position tables and patch kernels resized from a library's parameters,
  for as long as the parameters hold the same bits. Those of a deleted model stay until the bound or
  ``clear_all`` drops them.
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
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..tracing import in_cuda_graph
from .same_bits import Copy, copy_of, same_bits
from .spec import Resampling, Size

Result = TypeVar("Result")
Sources = tuple[Tensor, ...]


@dataclass
class _Made:
    """What was made from some tensors, the sources, for as long as they hold these bits."""

    key: tuple[Any, ...]  # among all entries
    versions: list[int]
    copies: tuple[Copy, ...] = ()  # of the sources, taken when the first tensor is made
    made: dict[Hashable, Tensor | None] = field(default_factory=dict)
    """Tensors by key. None: the key was met once."""


def _limit_of(mib: str) -> int:
    """The bound in bytes that ``TIMM_NAFLEX_FAST_CACHE_MIB`` sets; "": 512 MiB.

    Raises:
        ValueError: no whole number of MiB, 0 or more.
    """
    try:
        limit = int(mib or 512)
    except ValueError:
        limit = -1
    if limit < 0:
        raise ValueError(
            f"the environment variable {VARIABLE} must be a whole number of MiB, 0 (nothing is "
            f"kept) or more; got {mib[:40]!r}"
        )
    return limit * 2**20


VARIABLE = "TIMM_NAFLEX_FAST_CACHE_MIB"
_limit = _limit_of(os.environ.get(VARIABLE, ""))
_lock = threading.RLock()
# (function, arguments) to a result, ids of sources to a _Made; the oldest use first.
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
        result: Result | None = _use(key)
        if result is None:
            with without_autograd():
                result = function(*args)
            _keep(_entries, key, result)
        return result

    return call


def pinned(result: Result, device: torch.device) -> Result:
    """``result``, which stays in memory for good where a CUDA graph is being captured.

    The graph keeps its address.
    """
    if in_cuda_graph(device):
        _pinned[id(result)] = result
    return result


def embeddings(
    tables: Any,
    sizes: Iterable[Size],
    resample: Callable[..., Iterable[tuple[Size, Tensor]]],
    how: Resampling,
) -> Iterable[tuple[Size, Tensor]]:
    """The embeddings of each size from tables that need no gradient; those of a size that comes
    again are kept.

    Of tables that stay as they are, the first call with a size writes down that it was met, the
    second keeps its embeddings, and later ones take them: a grid that never comes again would only
    cost memory. What is kept is taken only if the tables, on a CPU, hold the same bits as then.

    Args:
        tables: of a kind of ``tables.py``, which imports this file.
        sizes: of the grids.
        resample: computes them, a strategy's; with ``how``, its third argument.
    """
    of_tables = _made_of(tables.tensors)
    own_size = tables.own_size(how.spec)  # its embeddings are the table, of which none is kept
    again: dict[Any, Size] = {}  # by their keys
    others = []
    cells_read = 0
    # From now on each size has been met.
    for size in sizes:
        key = (size, resample, how)
        if key in of_tables.made and size != own_size:
            again[key] = size
            cells_read += size[0] * size[1]
        else:
            others.append(size)
            of_tables.made.setdefault(key)

    # To compare the tables costs two reads of each of their cells; to sum, about eight reads of
    # each cell of a grid.
    cells_compared = 0
    for table in tables.tensors:
        cells_compared += table.numel() // table.shape[-1]
    # So a table that is much larger than its grids is never compared.
    if 2 * cells_compared >= 8 * cells_read:
        return resample(tables, sizes, how)

    def make(copies: Sources, key: Any) -> Tensor:
        ((_, of_grid),) = resample(type(tables)(copies), [again[key]], how)
        return of_grid.to(how.token_dtype)

    taken = zip(again.values(), _take(of_tables, tables.tensors, again, make))
    if not others:
        return taken
    return chain(taken, resample(tables, others, how))


def kept_of(
    sources: Sources, keys: Iterable[Hashable], make: Callable[[Sources, Any], Tensor]
) -> list[Tensor]:
    """For each key the tensor that is kept, or a new one: ``make(sources, key)``.

    The contents of the sources, on a CPU, are compared bit by bit on each call.
    """
    return _take(_made_of(sources), sources, keys, make)


def _made_of(sources: Sources) -> _Made:
    """What was made from these sources, if they have not changed, as far as their versions tell.

    The weights of a teacher change in each step.
    """
    versions = []
    for source in sources:
        # An inference tensor has no version, so any constant will do.
        versions.append(True if source.is_inference() else source._version)
    key = tuple(map(id, sources))  # ``swap_tensors`` refuses tensors that have weak references
    of_sources: _Made | None = _use(key)
    if of_sources is None or of_sources.versions != versions:
        of_sources = _Made(key, versions)
        _keep(_entries, key, of_sources)
    return of_sources


def _take(
    of_sources: _Made,
    sources: Sources,
    keys: Iterable[Hashable],
    make: Callable[[Sources, Any], Tensor],
) -> list[Tensor]:
    """What is kept for these keys, made anew if the sources have other bits than then."""
    if not of_sources.copies or not all(map(same_bits, of_sources.copies, sources)):
        with without_autograd():
            copies = tuple(copy_of(source) for source in sources)
        of_sources = _Made(of_sources.key, of_sources.versions, copies)
        _keep(_entries, of_sources.key, of_sources)
    taken = []
    for key in keys:
        tensor = of_sources.made.get(key)
        if tensor is None:
            with without_autograd():
                # From the copies that are compared: another thread may write to the sources.
                tensor = make(tuple(copy.tensor for copy in of_sources.copies), key)
                tensor = tensor.clone(memory_format=torch.contiguous_format)  # no view of a copy
            with _lock:
                if _use(of_sources.key) is of_sources:  # no other thread has replaced it
                    _keep(of_sources.made, key, tensor)
        taken.append(tensor)
    return taken


def forget(sources: Sources) -> None:
    """Drop what is kept of these sources: they are about to change."""
    global _nbytes
    with _lock:
        # Its copies would hold the old numbers, and memory that training needs.
        _nbytes -= _bytes_of(_entries.pop(tuple(map(id, sources)), None))


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
        # What was just put in may go as well, if it alone is larger than the bound.
        while _nbytes > _limit and _entries:
            _, oldest = _entries.popitem(last=False)
            _nbytes -= _bytes_of(oldest)


def _bytes_of(value: Any) -> int:
    """About what it takes in memory; 0 for None."""
    if value is None:
        return 0
    if isinstance(value, _Made):
        copies = tuple(copy.tensor for copy in value.copies)
        return _bytes_of((*copies, *value.made.values()))
    if isinstance(value, tuple):
        return 128 + sum(map(_bytes_of, value))
    return 256 + getattr(value, "nbytes", 0)
