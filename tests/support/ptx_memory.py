"""The memory of an emulated launch (``ptx``), and who touched it: what a GPU would not tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

SHARED, NOBODY, MANY = 2**15, -1, -2


class Fault(Exception):
    """The kernel does what it must not."""


class Memory:
    """A tensor's bytes, and which program of the launch has written or read each of its numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.start, self.unit = tensor, tensor.data_ptr(), tensor.element_size()
        # As long as the storage: a kernel may be handed the first of several parts.
        self.bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
        self.writer, self.reader = (np.full(tensor.numel(), NOBODY, np.int32) for _ in range(2))
        self.atomic = np.zeros(tensor.numel(), bool)

    def check(self, cells: Any, nbytes: int, cta: Any, root: str, text: str) -> None:
        for first in range(0, nbytes, min(nbytes, self.unit)):
            spot = (cells + first) // self.unit
            writer, reader = self.writer[spot], self.reader[spot]
            if root == "ld":
                clash = (writer != NOBODY) & (writer != cta)
                self.reader[spot] = np.where((reader == NOBODY) | (reader == cta), cta, MANY)
            else:
                clash = (writer != NOBODY) & (writer != cta) & ~(self.atomic[spot] & (root in ("atom", "red")))
                clash |= (reader != NOBODY) & (reader != cta)
                self.writer[spot] = cta
                clash |= (self.writer[spot] != cta) & (root not in ("atom", "red"))  # two programs in this very step
                self.atomic[spot] = root in ("atom", "red")
            if clash.any():
                raise Fault(f"two programs touch one number of {tuple(self.tensor.shape)}: {text}")


class SharedMemory:
    """The shared memory of all programs, and the warps that have touched each word since the last barrier."""

    def __init__(self, programs: int) -> None:
        self.bytes, self.written = np.zeros(programs * SHARED, np.uint8), np.zeros(programs * SHARED, bool)
        self.writer = np.full((programs, SHARED // 4), NOBODY, np.int8)
        self.reader = self.writer.copy()

    def pass_barrier(self, programs: Any) -> None:
        """All warps of these programs have arrived."""
        self.writer[programs] = self.reader[programs] = NOBODY

    def cells(self, at: Any, nbytes: int, program: Any, warp: Any, writes: bool, text: str) -> Any:
        """Where in ``bytes`` the addresses lie that threads touch."""
        cells = program * SHARED + at
        if (at < 0).any() or (at + nbytes > SHARED).any():
            raise Fault(f"outside of shared memory: {text}")
        if not writes and not all(self.written[cells + k].all() for k in range(nbytes)):
            raise Fault(f"shared memory that nobody wrote: {text}")
        for word in range(0, max(nbytes, 4), 4):
            spot = program, (at + word) // 4
            before = self.reader[spot]
            if any(((who != NOBODY) & (who != warp)).any() for who in (self.writer[spot], *[before] * writes)):
                raise Fault(f"no barrier after another warp's access to shared memory: {text}")
            if writes:
                self.writer[spot] = warp
            else:
                self.reader[spot] = np.where((before == NOBODY) | (before == warp), warp, MANY)
                # Two warps that read the same word in this very step.
                self.reader[spot] = np.where(self.reader[spot] == warp, self.reader[spot], MANY)
        for k in range(nbytes * writes):
            self.written[cells + k] = True
        return cells
