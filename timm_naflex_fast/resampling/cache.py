"""Finished tables, kept while the tables they were made from hold the same bits."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor


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
        self._met: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[weakref.ref[Tensor], ...]]] = {}
        self.nbytes = 0  # of finished tables and the copies of their sources

    def __len__(self) -> int:
        return len(self._tables)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._tables.clear()
            self._met.clear()
            self.nbytes = 0

    def settled(self, sources: tuple[Tensor, ...]) -> bool:
        """Whether these sources were asked for before and, as far as their version counters tell, not changed since.

        Worth asking before ``fetch``: finished tables that never serve twice would only cost memory.
        """
        key = tuple(id(source) for source in sources)
        versions = tuple(0 if source.is_inference() else source._version for source in sources)
        with self._lock:
            met = self._met.get(key)
            if met is None:
                self._met[key] = versions, tuple(weakref.ref(s, partial(self._forget, key)) for s in sources)
            elif met[0] != versions:
                self._met[key] = versions, met[1]
                self._drop(key)
        return met is not None and met[0] == versions

    def forget(self, sources: tuple[Tensor, ...]) -> None:
        """Drop what is kept of these sources, which are about to change."""
        if self._met or self._entries:
            key = tuple(id(source) for source in sources)
            with self._lock:
                self._met.pop(key, None)
                self._drop(key)

    def fetch(
        self,
        sources: tuple[Tensor, ...],
        sizes: list[tuple[int, int]],
        kind: Hashable,
        build: Callable[[tuple[int, int]], Tensor],
    ) -> Iterator[Tensor]:
        """The finished table of each size in turn, built by ``build(size)`` where none of these contents is kept."""
        key = tuple(id(source) for source in sources)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not all(map(_same_bits, entry.contents, sources)):
                self._drop(key)
                entry = self._add(key, sources)
        for size in sizes:
            name = (size, kind)
            with self._lock:
                table = self._tables.get((key, name)) if self._entries.get(key) is entry else None
                if table is None:
                    # Outside inference mode: what is kept here must serve a training step later.
                    with torch.inference_mode(False), torch.no_grad():
                        table = build(size).contiguous()
                    if self._entries.get(key) is entry:  # else another thread met other contents meanwhile
                        self._tables[key, name] = table
                        entry.tables.add(name)
                        self.nbytes += table.nbytes
                        self._shrink()
                else:
                    self._tables.move_to_end((key, name))
            yield table

    def _add(self, key: tuple[int, ...], sources: tuple[Tensor, ...]) -> _Entry:
        with torch.inference_mode(False), torch.no_grad():
            entry = self._entries[key] = _Entry(tuple(source.detach().clone() for source in sources))
        entry.watch = tuple(weakref.ref(source, partial(self._forget, key)) for source in sources)
        self.nbytes += sum(t.nbytes for t in entry.contents)
        return entry

    def _forget(self, key: tuple[int, ...], _: object) -> None:
        with self._lock:
            self._met.pop(key, None)
            self._drop(key)

    def _drop(self, key: tuple[int, ...]) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.nbytes -= sum(t.nbytes for t in entry.contents)
                for name in entry.tables:
                    self.nbytes -= self._tables.pop((key, name)).nbytes

    def _shrink(self) -> None:
        while self.nbytes > self.max_bytes and self._tables:
            (key, name), table = self._tables.popitem(last=False)
            self.nbytes -= table.nbytes
            entry = self._entries[key]
            entry.tables.discard(name)
            if not entry.tables:
                self._drop(key)


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


def held_over_fork(lock: Any) -> None:
    """Let no thread but the forking one hold ``lock`` while the process forks: its child could never take it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


cache = TableCache()
held_over_fork(cache._lock)
