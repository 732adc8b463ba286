"""Devices on a CPU: tensors that hold real numbers and call themselves another device's.

Inside a :class:`Machine`, ``.to(NAME)`` and ``device=NAME`` make them; an operator that mixes them
with tensors of the CPU raises, as on such a device.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from timm_naflex_fast import tracing
from timm_naflex_fast.resampling import kept

aten = torch.ops.aten
CPU = torch.device("cpu")
# An index may be the CPU's.
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten.copy_, aten._to_copy}


class Pretended(Tensor):
    """A tensor of the CPU, ``held``, that says it is on ``where``.

    PyTorch's C++ takes it for the CPU's.
    """

    where: ClassVar[torch.device]
    device = property(lambda self: self.where)
    is_cuda = property(lambda self: self.where.type == "cuda")
    is_mps = property(lambda self: self.where.type == "mps")
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    def read(self, why):
        """What happens where the host waits for this tensor's numbers."""

    def to(self, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        out = super().to(dtype or self.dtype, copy=copy)
        return out.cpu() if device == CPU else out

    def cpu(self):
        self.read("a copy between devices")
        return self.held.clone()

    def tolist(self):
        self.read("tolist")
        return self.held.tolist()


class Machine(TorchDispatchMode):
    """Inside, the name of ``own``'s device makes tensors of the class ``own``."""

    own: ClassVar[type[Pretended]]

    def __init__(self, patch):
        super().__init__()
        # This mode is the machine: nobody watches, and its tensors stand for plain ones.
        patch.setattr(kept, "watched", lambda: False)
        patch.setattr(tracing, "OWN_MEMORY", (*tracing.OWN_MEMORY, self.own))

    def before(self, func, tensors, args, kwargs):
        """Called with each operator that makes or takes tensors of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        to_device = self.is_named(kwargs)
        if not to_device and not any(isinstance(t, self.own) for t in tensors):
            return func(*args, **kwargs)
        if func.overloadpacket not in COPIES:
            self._refuse_mixed(func, tensors)
        self.before(func, tensors, args, kwargs)
        if to_device:
            kwargs["device"] = CPU

        # The operator runs on the CPU; a tensor that it was given comes back as the same object.
        own = {id(_held(t)): t for t in tensors}
        out = func(*tree_map_only(Tensor, _held, args), **tree_map_only(Tensor, _held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else self.own(t), out)

    def is_named(self, kwargs):
        """Whether the operator is told to make its result on the device."""
        return (kwargs.get("device") or CPU).type == self.own.where.type

    def _refuse_mixed(self, func, tensors):
        """No operator mixes devices; but a number, and an index, may be the CPU's."""
        if func.overloadpacket in TAKES_INDEX and isinstance(tensors[0], self.own):
            return
        for other in self.others(tensors):
            got = f"{tuple(other.shape)} {other.dtype}"
            raise RuntimeError(f"{func} takes a tensor of the CPU, {got}")

    def others(self, tensors):
        """Those of the CPU, numbers apart."""
        return [t for t in tensors if not isinstance(t, self.own) and t.ndim]


def _held(tensor):
    return tensor.held if isinstance(tensor, Pretended) else tensor


def moved(module, to):
    """The module, with parameters and buffers where ``to`` moves them."""
    for part in module.modules():
        for name, value in part.named_parameters(recurse=False):
            part._parameters[name] = torch.nn.Parameter(to(value.detach()))
        for name, value in part.named_buffers(recurse=False):
            part._buffers[name] = to(value)
    return module
