"""timm's own ``F.interpolate``, once per distinct grid, and one gather-add; finished tables kept while they hold.

Bit-identical to timm on CPU: the same call on the same tensor. What differs is the write: timm adds into slices of
``x``, and autograd then copies the whole gradient once per grid; one gather makes the backward linear in tokens.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grids import Group, add_cells
from ..resize import Resampling


def add_learned(x: Tensor, table: Tensor, groups: list[Group], how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resized to each sample's grid, into ``x`` (B, N, C) in place."""

    def build(size: tuple[int, int]) -> Tensor:
        h, w = size
        if size == tuple(table.shape[-3:-1]):
            return table.reshape(h * w, -1).to(x.dtype)
        resized = F.interpolate(
            table.reshape(1, *table.shape[-3:]).permute(0, 3, 1, 2).float(),
            size=how.lengths(h, w),
            mode=how.mode,
            align_corners=how.align_corners,
            antialias=how.antialias,
        )
        return resized[0, :, :h, :w].flatten(1).t().to(x.dtype)

    _gather_add(x, (table,), groups, how, build)


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, groups: list[Group], ar_preserving: bool = False
) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place."""
    how = Resampling(mode="linear", ar_preserving=ar_preserving)

    def line(table: Tensor, n: int) -> Tensor:
        table = table.reshape(1, *table.shape[-2:])
        if n != table.shape[1]:
            table = F.interpolate(table.permute(0, 2, 1).float(), size=n, mode="linear").permute(0, 2, 1)
        return table[0].to(x.dtype)

    def build(size: tuple[int, int]) -> Tensor:
        rows, cols = how.lengths(*size)
        return (line(table_y, rows)[: size[0], None] + line(table_x, cols)[None, : size[1]]).flatten(0, 1)

    _gather_add(x, (table_y, table_x), groups, how, build)


def _gather_add(
    x: Tensor,
    sources: tuple[Tensor, ...],
    groups: list[Group],
    how: Resampling,
    build: Callable[[tuple[int, int]], Tensor],
) -> None:
    if not groups:
        return
    sizes = list(dict.fromkeys((group.h, group.w) for group in groups))
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        tables = [build(size) for size in sizes]
    else:
        tables = cache.fetch(sources, sizes, (how, x.dtype), build)
        if not (torch.is_grad_enabled() and x.requires_grad):  # no backward, so slices cost nothing and need no copy
            finished = dict(zip(sizes, tables))
            for group in groups:
                add_cells(x, group, finished[group.h, group.w])
            return
    starts, end = {}, 0
    for size, cells in zip(sizes, tables):
        starts[size], end = end, end + len(cells)
    # Tokens outside their grid read a row of -0.0, the one value that leaves every float as it is, 0.0 and -0.0 too.
    flat = torch.cat([*tables, x.new_full((1, x.shape[-1]), -0.0)])
    index = torch.full(x.shape[:2], end, dtype=torch.int64, device="cpu")
    reordered = []
    for group in groups:
        start = starts[group.h, group.w]
        if group.cells is None and group.samples:
            index[group.samples, : group.tokens] = torch.arange(start, start + group.tokens, device="cpu")
        elif group.cells is not None:
            reordered.append((group.samples[0], group.tokens, start + group.cells))
    index = index.to(x.device)
    for sample, tokens, rows in reordered:
        index[sample, :tokens] = rows
    x.add_(F.embedding(index, flat, padding_idx=end))


@dataclass
class _Entry:
    """Finished tables of one set of source tables, and the sources' contents when they were made."""

    contents: tuple[Tensor, ...]
    watch: tuple[weakref.ref[Tensor], ...] = ()
    tables: set[Hashable] = field(default_factory=set)


class TableCache:
    """Finished tables, least recently used out first, at most ``max_bytes`` with the copies of their sources.

    A source's contents are compared bit by bit on each use: its version counter and address do not move when
    somebody writes to ``.data``.
    """

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._tables: OrderedDict[tuple[tuple[int, ...], Hashable], Tensor] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes held: finished tables and the copies of their sources."""
        with self._lock:
            kept = [t for entry in list(self._entries.values()) for t in entry.contents] + list(self._tables.values())
        return sum(t.nbytes for t in kept)

    def __len__(self) -> int:
        return len(self._tables)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._tables.clear()

    def fetch(
        self,
        sources: tuple[Tensor, ...],
        sizes: list[tuple[int, int]],
        kind: Hashable,
        build: Callable[[tuple[int, int]], Tensor],
    ) -> list[Tensor]:
        """The finished table of each size, built by ``build(size)`` where none made from these contents is kept."""
        key = tuple(id(source) for source in sources)
        # Outside inference mode: what is kept here must serve a training step later.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            entry = self._entries.get(key)
            if entry is None or not all(map(_same_bits, entry.contents, sources)):
                self._drop(key)
                entry = self._entries[key] = _Entry(tuple(source.detach().clone() for source in sources))
                entry.watch = tuple(weakref.ref(source, partial(self._forget, key)) for source in sources)
            found, grown = [], False
            for size in sizes:
                name = (size, kind)
                if name not in entry.tables:
                    self._tables[key, name] = build(size).contiguous()
                    entry.tables.add(name)
                    grown = True
                self._tables.move_to_end((key, name))
                found.append(self._tables[key, name])
            if grown:
                self._shrink()
        return found

    def _forget(self, key: tuple[int, ...], _: object) -> None:
        self._drop(key)

    def _drop(self, key: tuple[int, ...]) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            for name in entry.tables if entry else ():
                self._tables.pop((key, name), None)

    def _shrink(self) -> None:
        excess = self.nbytes - self.max_bytes
        while excess > 0 and self._tables:
            (key, name), table = self._tables.popitem(last=False)
            excess -= table.nbytes
            entry = self._entries[key]
            entry.tables.discard(name)
            if not entry.tables:
                excess -= sum(t.nbytes for t in entry.contents)
                del self._entries[key]


def _same_bits(kept: Tensor, now: Tensor) -> bool:
    if kept.shape != now.shape or kept.dtype != now.dtype or kept.device != now.device:
        return False
    return torch.equal(*_as_integers(kept, now.detach()))


def _as_integers(*tensors: Tensor) -> list[Tensor]:
    """Views on the same bits as integers, the widest possible: comparing takes time by the number of elements."""
    size = tensors[0].element_size()
    if all(t.is_contiguous() and t.numel() * size % 8 == 0 and t.storage_offset() * size % 8 == 0 for t in tensors):
        return [t.view(-1).view(torch.int64) for t in tensors]
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return [t.view(as_int) for t in tensors]


cache = TableCache()
