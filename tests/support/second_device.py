"""A second device on a CPU: tensors that call themselves CUDA's, hold real numbers, and refuse what
a GPU refuses.

Inside :class:`SecondDevice`, ``.to("cuda")`` and ``device="cuda"`` make :class:`OnDevice` tensors,
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
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = Path(__file__).resolve().parents[2] / "timm_naflex_fast"
READS_BACK = (
    "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim _linalg_check_errors"
)
READS_BACK = {getattr(aten, name) for name in READS_BACK.split()}
TAKES_INDEX = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
}  # which may be the CPU's
waits = Counter()


def wait(why):
    """Count a wait for the device, by the innermost line of the package."""
    if SecondDevice.captures:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    frame = sys._getframe()
    while frame.f_back and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back
    name = Path(frame.f_code.co_filename)
    line = (
        f"{name.relative_to(PACKAGE)}:{frame.f_lineno}"
        if name.is_relative_to(PACKAGE)
        else "outside"
    )
    waits[f"{line} {why}"] += 1


class OnDevice(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the first CUDA device; PyTorch's C++ takes
    it for the CPU's."""

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
    """Inside, ``"cuda"`` names the second device. While it ``captures`` a CUDA graph, a wait is an
    error.

    So is a copy for which the host does not wait: the graph would read that memory again when it is
    long free.
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
        packet, kwargs = func.overloadpacket, dict(kwargs or {})
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        theirs = [
            t
            for t in tensors
            if not isinstance(t, OnDevice) and (t.ndim or packet is aten._to_copy)
        ]
        to_device = (kwargs.get("device") or CPU).type == "cuda"
        if not to_device and not any(isinstance(t, OnDevice) for t in tensors):
            return func(*args, **kwargs)
        if packet in (aten.copy_, aten._to_copy) and theirs:
            from_host = to_device or isinstance(args[0], OnDevice)
            if not (from_host and kwargs.get("non_blocking", args[2:] == (True,))):
                wait("a copy between devices")
            assert not self.captures, "a graph holds a copy from the host"
        elif theirs and packet in TAKES_INDEX and isinstance(args[0], OnDevice):
            wait("an index is copied")
        elif theirs:
            raise RuntimeError(
                f"{func} takes a tensor of the CPU, {tuple(theirs[0].shape)} {theirs[0].dtype}"
            )
        masked = packet in TAKES_INDEX and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if (
            packet in READS_BACK
            or masked
            or (packet is aten.repeat_interleave and not kwargs.get("output_size"))
        ):
            wait(func.name())
        held = lambda t: t.held if isinstance(t, OnDevice) else t
        own = {id(held(t)): t for t in tensors}
        kwargs |= {"device": CPU} if to_device else {}
        out = func(*tree_map_only(Tensor, held, args), **tree_map_only(Tensor, held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else OnDevice(t), out)
