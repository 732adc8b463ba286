"""A device without float64 on a CPU: tensors that call themselves Metal's ("mps").

Inside :class:`Metal`, ``.to("mps")`` and ``device="mps"`` make :class:`OnMetal` tensors, whose
memory is the CPU's. An operator raises that Apple's GPUs lack, or had not before torch 2.10:
float64 in any form, ``embedding_bag``, a product of int64, tensors of two devices. ``ran`` counts
the operators and the dtypes of their results.
"""

from collections import Counter
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from timm_naflex_fast.resampling import kept

aten = torch.ops.aten
MPS, CPU = torch.device("mps", 0), torch.device("cpu")
LACKING = {aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linalg_solve_ex}
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten.copy_, aten._to_copy}


class OnMetal(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the first Metal device."""

    device = property(lambda self: MPS)
    is_mps = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        if held.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    def to(self, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return self.cpu().to(dtype or self.dtype)
        return super().to(dtype or self.dtype, copy=copy)

    def cpu(self):
        Metal.ran["read on the host"] += 1
        return self.held.clone()

    def tolist(self):
        return self.cpu().tolist()


class Metal(TorchDispatchMode):
    """Inside, ``"mps"`` names the device. ``lacking``: further operators that it has not."""

    ran: ClassVar[Counter] = Counter()

    def __init__(self, patch, lacking=()):
        super().__init__()
        self.lacking = LACKING | set(lacking)
        Metal.ran.clear()
        patch.setattr(kept, "watched", lambda: False)  # this mode is the machine: nobody watches
        for name in ("tensor", "as_tensor"):  # they write to the device's memory in C++
            patch.setattr(torch, name, _by_copy(getattr(torch, name)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        to_device = (kwargs.get("device") or CPU).type == "mps"
        if not to_device and not any(isinstance(t, OnMetal) for t in tensors):
            return func(*args, **kwargs)
        self._refuse(func, args, kwargs, tensors)

        def held(tensor):
            return tensor.held if isinstance(tensor, OnMetal) else tensor

        own = {id(held(t)): t for t in tensors}
        if to_device:
            kwargs["device"] = CPU
        out = func(*tree_map_only(Tensor, held, args), **tree_map_only(Tensor, held, kwargs))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                Metal.ran[str(tensor.dtype)] += 1
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else OnMetal(t), out)

    def _refuse(self, func, args, kwargs, tensors):
        packet = func.overloadpacket
        if packet in self.lacking:
            raise NotImplementedError(
                f"The operator '{func}' is not implemented for the MPS device"
            )
        if kwargs.get("dtype") is torch.float64 or torch.float64 in args:
            raise TypeError("MPS framework doesn't support float64")
        if packet in PRODUCTS and any(t.dtype is torch.int64 for t in tensors):
            raise RuntimeError(f"{func} of integers on the MPS device")
        if packet in COPIES:
            return
        for tensor in tensors:
            if tensor.dtype is torch.float64 and tensor.ndim:
                raise TypeError("MPS framework doesn't support float64")
            is_index = packet in TAKES_INDEX and tensor is not args[0]
            if not isinstance(tensor, OnMetal) and tensor.ndim and not is_index:
                raise RuntimeError(
                    f"{func}: expected all tensors on one device, found a tensor of the CPU, "
                    f"{tuple(tensor.shape)} {tensor.dtype}"
                )


def _by_copy(make):
    """A function that makes a tensor of Python's numbers: on the CPU, and copied to the device."""

    def made(data, *, device=None, **kwargs):
        tensor = make(data, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made
