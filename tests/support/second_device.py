"""A second device on a CPU: tensors that hold real numbers and call themselves CUDA's or Metal's.

Inside a :class:`SecondDevice`, ``.to(NAME)`` and ``device=NAME`` make them. An operator that mixes
them with tensors of the CPU raises, as on such a device. Where the host would wait for the device
(what ``torch.cuda.set_sync_debug_mode`` finds: a number read back, a copy that blocks, a result
whose size depends on values), ``waits`` gets the line of the package that asked.
"""

import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tests.support.oracles import tracer_alone
from timm_naflex_fast import tracing
from timm_naflex_fast.pos_embed import kept

aten = torch.ops.aten
PACKAGE = Path(__file__).resolve().parents[2] / "timm_naflex_fast"
CPU = torch.device("cpu")
# An index may be the CPU's.
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten.copy_, aten._to_copy}
READS_BACK = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten._linalg_check_errors,
}
# What Apple's GPUs lack.
METAL_LACKS = {aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only}
waits = []


def wait(why):
    """Note a wait for the device, by the innermost line of the package."""
    if SecondDevice.captures:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    ours = [f for f in frames if Path(f.f_code.co_filename).is_relative_to(PACKAGE)]
    waits.append(f"{ours[:1]} {why}")


class OnDevice(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the second device.

    PyTorch's C++ takes it for the CPU's. None on Metal, so no result of an operator, is float64.
    """

    where = torch.device("cuda", 0)
    device = property(lambda self: self.where)
    is_cuda = property(lambda self: self.where.type == "cuda")
    is_mps = property(lambda self: self.where.type == "mps")
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        if cls.where.type == "mps" and held.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    def to(self, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        out = super().to(dtype or self.dtype, copy=copy)
        return out.cpu() if device == CPU else out

    def cpu(self):
        wait("a copy between devices")
        return self.held.clone()

    def tolist(self):
        wait("tolist")
        return self.held.tolist()


@contextmanager
def _on_the_machine():
    """``kept.unseen``, but in the sight of modes."""
    with torch.inference_mode(False):
        yield


class SecondDevice(TorchDispatchMode):
    """Inside, ``name`` ("cuda" or "mps") names the device.

    While it ``captures`` a CUDA graph, a wait is an error. So is a copy for which the host does not
    wait: the graph would read that memory again when it is long free.
    """

    captures = False

    def __init__(self, patch, name="cuda"):
        super().__init__()
        patch.setattr(OnDevice, "where", torch.device(name, 0))
        self.lacking = METAL_LACKS if name == "mps" else set()
        waits.clear()
        # This mode is the machine: nobody watches, and its tensors stand for plain ones.
        patch.setattr(tracing, "watcher", tracer_alone(tracing.watcher))
        patch.setattr(kept, "unseen", _on_the_machine)
        patch.setattr(tracing, "OWN_MEMORY", (*tracing.OWN_MEMORY, OnDevice))
        # What makes its result in C++, which knows no second device.
        one_hot = F.one_hot
        patch.setattr(F, "one_hot", lambda index, n: OnDevice(one_hot(index.held, n)))
        if name == "mps":
            for maker in ("tensor", "as_tensor"):
                patch.setattr(torch, maker, _by_copy(getattr(torch, maker)))
        else:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
            if not torch.cuda.is_available():  # what asks for "cuda" comes here, not to a driver
                patch.setattr(torch.cuda, "_lazy_init", lambda: None)
                torch._C._ensureCUDADeviceGuardSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        to_device = (kwargs.get("device") or CPU).type == OnDevice.where.type
        if not to_device and not any(isinstance(t, OnDevice) for t in tensors):
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in COPIES:
            self._check_copy(tensors, to_device, kwargs.get("non_blocking", args[2:] == (True,)))
        else:
            self._check_devices(func, tensors)
        if _waits_for_values(packet, args, kwargs):
            wait(func.name())
        if packet in self.lacking:
            raise NotImplementedError(f"'{func}' is not implemented for {OnDevice.where}")
        if to_device:
            kwargs["device"] = CPU

        # The operator runs on the CPU; a tensor that it was given comes back as the same object.
        own = {id(_held(t)): t for t in tensors}
        out = func(*tree_map_only(Tensor, _held, args), **tree_map_only(Tensor, _held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else OnDevice(t), out)

    def _check_devices(self, func, tensors):
        """No operator mixes devices; but a number may be the CPU's, and an index, at a wait."""
        others = [t for t in tensors if not isinstance(t, OnDevice) and t.ndim]
        if others and func.overloadpacket in TAKES_INDEX and isinstance(tensors[0], OnDevice):
            wait("an index is copied")
        elif others:
            shape, dtype = tuple(others[0].shape), others[0].dtype
            raise RuntimeError(f"{func} takes a tensor of the CPU, {shape} {dtype}")

    def _check_copy(self, tensors, to_device, non_blocking):
        """A copy between devices waits, unless it goes to this one and may be late."""
        others = [t for t in tensors if not isinstance(t, OnDevice) and (t.ndim or to_device)]
        if not others:
            return
        from_host = to_device or isinstance(tensors[0], OnDevice)
        if not (from_host and non_blocking):
            wait("a copy between devices")
        assert not self.captures, "a graph holds a copy from the host"


def _held(tensor):
    return tensor.held if isinstance(tensor, OnDevice) else tensor


def _waits_for_values(packet, args, kwargs):
    """Whether a GPU's operator reads a number back: the result's own, or how large it is."""
    if packet in TAKES_INDEX:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave:
        return not kwargs.get("output_size")
    return packet in READS_BACK


def _by_copy(make):
    """A function that makes a tensor of Python's numbers: on the CPU, and copied to the device."""

    def made(data, *, device=None, **kwargs):
        tensor = make(data, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def moved(module, to):
    """The module, with parameters and buffers where ``to`` moves them."""
    for part in module.modules():
        for name, value in part.named_parameters(recurse=False):
            part._parameters[name] = torch.nn.Parameter(to(value.detach()))
        for name, value in part.named_buffers(recurse=False):
            part._buffers[name] = to(value)
    return module
