"""A second device on a CPU: tensors that call themselves CUDA's.

They hold real numbers, and refuse what a GPU refuses. Inside :class:`SecondDevice`, ``.to("cuda")`` and ``device="cuda"`` make :class:`OnDevice` tensors,
whose memory is the CPU's. An operator that mixes them with tensors of the CPU raises, as on a GPU.
Where the host would wait for the device (what ``torch.cuda.set_sync_debug_mode`` finds: a number
read back, a copy that blocks, a result whose size depends on values), ``waits`` counts the line of
the package that asked.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from timm_naflex_fast.resampling import kept

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
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
# An index may be the CPU's.
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten.copy_, aten._to_copy}
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


class OnDevice(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the first CUDA device.

    PyTorch's C++ takes it for the CPU's.
    """

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    def to(self, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        out = super().to(dtype or self.dtype, copy=copy)
        return out if device is None or device.type == "cuda" else out.cpu()

    def cpu(self):
        wait("a copy between devices")
        return self.held.clone()

    def tolist(self):
        wait("tolist")
        return self.held.tolist()


class SecondDevice(TorchDispatchMode):
    """Inside, ``"cuda"`` names the second device.

    While it ``captures`` a CUDA graph, a wait is an error. So is a copy for which the host does not
    wait: the graph would read that memory again when it is long free.
    """

    captures = False

    def __init__(self, patch):
        super().__init__()
        waits.clear()
        one_hot = F.one_hot  # makes an arange in C++
        patch.setattr(F, "one_hot", lambda index, n: OnDevice(one_hot(index.held, n)))
        patch.setattr(kept, "watched", lambda: False)  # this mode is the machine: nobody watches
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        if not torch.cuda.is_available():  # what asks for "cuda" comes here, not to a driver
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            torch._C._ensureCUDADeviceGuardSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        to_device = (kwargs.get("device") or CPU).type == "cuda"
        if to_device:
            kwargs["device"] = CPU
        elif not any(isinstance(t, OnDevice) for t in tensors):
            return func(*args, **kwargs)

        if func.overloadpacket in COPIES:
            self._check_copy(tensors, to_device, kwargs.get("non_blocking", args[2:] == (True,)))
        else:
            self._check_devices(func, tensors)
        if _waits_for_values(func.overloadpacket, args, kwargs):
            wait(func.name())

        # The operator runs on the CPU; a tensor that it was given comes back as the same object.
        own = {id(_held(t)): t for t in tensors}
        out = func(*tree_map_only(Tensor, _held, args), **tree_map_only(Tensor, _held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else OnDevice(t), out)

    def _check_copy(self, tensors, to_device, non_blocking):
        """A copy between devices waits, unless it goes to this one and may be late."""
        others = [t for t in tensors if not isinstance(t, OnDevice) and (t.ndim or to_device)]
        if not others:
            return
        from_host = to_device or isinstance(tensors[0], OnDevice)
        if not (from_host and non_blocking):
            wait("a copy between devices")
        assert not self.captures, "a graph holds a copy from the host"

    def _check_devices(self, func, tensors):
        """No operator mixes devices; but a number, and an index, may be the CPU's."""
        others = [t for t in tensors if not isinstance(t, OnDevice) and t.ndim > 0]
        if not others:
            return
        if func.overloadpacket in TAKES_INDEX and isinstance(tensors[0], OnDevice):
            wait("an index is copied")
            return
        got = f"{tuple(others[0].shape)} {others[0].dtype}"
        raise RuntimeError(f"{func} takes a tensor of the CPU, {got}")


def _held(tensor):
    return tensor.held if isinstance(tensor, OnDevice) else tensor


def _waits_for_values(packet, args, kwargs):
    """Whether a GPU's operator reads a number back: the result's own, or how large it is."""
    if packet in TAKES_INDEX:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave:
        return not kwargs.get("output_size")
    return packet in READS_BACK
