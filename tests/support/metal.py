"""A device without float64 on a CPU: tensors that call themselves Metal's ("mps").

An operator raises that Apple's GPUs lack, or had not before torch 2.10: float64 in any form,
``embedding_bag``, a product of int64, tensors of two devices. ``reads`` counts what was read on the
host.
"""

from collections import Counter

import torch

from tests.support.pretended import Machine, Pretended, aten

LACKING = {aten.embedding_bag, aten._embedding_bag, aten._embedding_bag_forward_only}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}
reads = Counter()


class OnMetal(Pretended):
    """A tensor on the first Metal device. None, so no result of an operator, is float64."""

    where = torch.device("mps", 0)

    @staticmethod
    def __new__(cls, held):
        if held.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return Pretended.__new__(cls, held)

    def read(self, why):
        reads[why] += 1


class Metal(Machine):
    """Inside, ``"mps"`` names the device. ``lacking``: further operators that it has not."""

    own = OnMetal

    def __init__(self, patch, lacking=()):
        super().__init__(patch)
        self.lacking = LACKING | set(lacking)
        reads.clear()
        for name in ("tensor", "as_tensor"):  # they write to the device's memory in C++
            patch.setattr(torch, name, _by_copy(getattr(torch, name)))

    def before(self, func, tensors, args, kwargs):
        packet = func.overloadpacket
        if packet in self.lacking:
            raise NotImplementedError(
                f"The operator '{func}' is not implemented for the MPS device"
            )
        if packet in PRODUCTS and any(t.dtype is torch.int64 for t in tensors):
            raise RuntimeError(f"{func} of integers on the MPS device")


def _by_copy(make):
    """A function that makes a tensor of Python's numbers: on the CPU, and copied to the device."""

    def made(data, *, device=None, **kwargs):
        tensor = make(data, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made
