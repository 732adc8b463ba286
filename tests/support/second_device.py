"""A second device on a CPU: tensors that call themselves CUDA's.

Where the host would wait for the device (what ``torch.cuda.set_sync_debug_mode`` finds: a number
read back, a copy that blocks, a result whose size depends on values), ``waits`` counts the line of
the package that asked.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.support.pretended import COPIES, TAKES_INDEX, Machine, Pretended, aten

PACKAGE = Path(__file__).resolve().parents[2] / "timm_naflex_fast"
READS_BACK = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten._linalg_check_errors,
}
waits = Counter()


def wait(why):
    """Count a wait for the device, by the innermost line of the package."""
    if SecondDevice.captures:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    frame = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            waits[f"{file.relative_to(PACKAGE)}:{frame.f_lineno} {why}"] += 1
            return
        frame = frame.f_back
    waits[f"outside {why}"] += 1


class OnDevice(Pretended):
    """A tensor on the first CUDA device."""

    where = torch.device("cuda", 0)

    def read(self, why):
        wait(why)


class SecondDevice(Machine):
    """Inside, ``"cuda"`` names the second device.

    While it ``captures`` a CUDA graph, a wait is an error. So is a copy for which the host does not
    wait: the graph would read that memory again when it is long free.
    """

    own = OnDevice
    captures = False

    def __init__(self, patch):
        super().__init__(patch)
        waits.clear()
        one_hot = F.one_hot  # makes an arange in C++
        patch.setattr(F, "one_hot", lambda index, n: OnDevice(one_hot(index.held, n)))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        if not torch.cuda.is_available():  # what asks for "cuda" comes here, not to a driver
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            torch._C._ensureCUDADeviceGuardSet()

    def before(self, func, tensors, args, kwargs):
        packet = func.overloadpacket
        if packet in COPIES:
            self._check_copy(tensors, kwargs, kwargs.get("non_blocking", args[2:] == (True,)))
        elif packet in TAKES_INDEX and self.others(tensors):
            wait("an index is copied")
        if _waits_for_values(packet, args, kwargs):
            wait(func.name())

    def _check_copy(self, tensors, kwargs, non_blocking):
        """A copy between devices waits, unless it goes to this one and may be late."""
        to_device = self.is_named(kwargs)
        others = [t for t in tensors if not isinstance(t, OnDevice) and (t.ndim or to_device)]
        if not others:
            return
        from_host = to_device or isinstance(tensors[0], OnDevice)
        if not (from_host and non_blocking):
            wait("a copy between devices")
        assert not self.captures, "a graph holds a copy from the host"


def _waits_for_values(packet, args, kwargs):
    """Whether a GPU's operator reads a number back: the result's own, or how large it is."""
    if packet in TAKES_INDEX:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave:
        return not kwargs.get("output_size")
    return packet in READS_BACK
