"""A second device on a CPU: tensors that call themselves CUDA's, hold real numbers, and refuse what a GPU refuses.

Inside :class:`SecondDevice`, ``.to("cuda")`` and ``device="cuda"`` make :class:`OnDevice` tensors, whose memory is the
CPU's. An operator that mixes them with tensors of the CPU raises, as on a GPU. Where the host would wait for the device
(what ``torch.cuda.set_sync_debug_mode`` finds: a number read back, a copy that blocks, a result whose size depends on
values), ``waits`` counts the line of the package that asked.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = Path(__file__).resolve().parents[2] / "timm_naflex_fast"
READS_BACK = "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim _linalg_check_errors"
READS_BACK = {getattr(aten, name) for name in READS_BACK.split()}
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # which may be the CPU's
FACTORIES = "arange empty eye full linspace ones rand randn zeros tensor "
FACTORIES += "empty_like full_like ones_like rand_like randn_like zeros_like"
FACTORIES = {getattr(torch, name) for name in FACTORIES.split()}


class OnDevice(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the first CUDA device."""

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        theirs = [t for t in tensors if not isinstance(t, cls) and t.ndim]
        if packet is aten.copy_ and theirs:
            if not (isinstance(args[0], cls) and (*args, kwargs.get("non_blocking", False))[2]):
                wait("a copy between devices")
            assert not SecondDevice.captures, "a graph holds a copy from the host"
        elif theirs and packet in TAKES_INDEX and isinstance(args[0], cls):
            wait("an index is copied")
        elif theirs:
            raise RuntimeError(f"{func} takes a tensor of the CPU, {tuple(theirs[0].shape)} {theirs[0].dtype}")
        masked = packet in TAKES_INDEX and any(i is not None and i.dtype == torch.bool for i in args[1])
        if packet in READS_BACK or masked or (packet is aten.repeat_interleave and not kwargs.get("output_size")):
            wait(func.name())
        held = lambda t: t.held if isinstance(t, cls) else t
        own = {id(held(t)): t for t in tensors}
        out = func(*tree_map_only(Tensor, held, args), **tree_map_only(Tensor, held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else cls(t), out)


class Move(torch.autograd.Function):
    """A copy on the other device."""

    @staticmethod
    def forward(ctx, x, to):
        ctx.came_from = x.device
        return OnDevice(x.clone()) if to.type == "cuda" else x.held.clone()

    @staticmethod
    def backward(ctx, *grads):
        return Move.apply(grads[0], ctx.came_from), None


waits = Counter()


def wait(why):
    """Count a wait for the device, by the innermost line of the package."""
    if SecondDevice.captures:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    frame = sys._getframe()
    while frame.f_back and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame = frame.f_back
    name = Path(frame.f_code.co_filename)
    line = f"{name.relative_to(PACKAGE)}:{frame.f_lineno}" if name.is_relative_to(PACKAGE) else "outside"
    waits[f"{line} {why}"] += 1


class SecondDevice(TorchFunctionMode):
    """Inside, ``"cuda"`` names the second device. While it ``captures`` a CUDA graph, a wait is an error.

    So is a copy for which the host does not wait: the graph would read that memory again when it is long free.
    """

    captures = False

    def __init__(self, patch):
        super().__init__()
        waits.clear()
        run_backward = torch.autograd._engine_run_backward

        def inside(*args, **kwargs):
            with self:  # a mode is off while it handles ``torch.autograd.grad``
                return run_backward(*args, **kwargs)

        patch.setattr(torch.autograd, "_engine_run_backward", inside)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self.move(func, *args, **kwargs)
        if func in (Tensor.tolist, Tensor.new_tensor) and isinstance(args[0], OnDevice):
            wait(func.__name__)
            out = func(args[0].held, *args[1:], **kwargs)
            return OnDevice(out) if func is Tensor.new_tensor else out
        if func is torch.nn.functional.one_hot and isinstance(args[0], OnDevice):  # for subclasses it makes an arange
            return OnDevice(func(args[0].held, *args[1:], **kwargs))
        if func is torch.nn.functional.embedding_bag and args[0].ndim == 2:  # makes offsets where this mode is off
            offsets = OnDevice(torch.arange(0, args[0].numel(), args[0].shape[1]))
            return func(args[0].reshape(-1), args[1], *args[3:], **{**kwargs, "offsets": offsets})
        if func in FACTORIES and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            if func is torch.tensor:
                wait("tensor")
            like = [a.held if isinstance(a, OnDevice) else a for a in args]
            asks = kwargs.pop("requires_grad", False)
            return OnDevice(func(*like, **{**kwargs, "device": CPU})).requires_grad_(asks)
        return func(*args, **kwargs)

    @staticmethod
    def move(func, x, *args, **kwargs):
        args = {Tensor.cpu: ("cpu",), Tensor.cuda: ("cuda",)}.get(func, args)
        if isinstance(args[0] if args else None, Tensor):
            args = (args[0].device, args[0].dtype)
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        x = Tensor.to(x, dtype or x.dtype, copy=copy)
        if device is None or device.type == x.device.type:
            return x
        if device.type == "cpu" or not non_blocking:
            wait("a copy between devices")
        assert not SecondDevice.captures, "a graph holds a copy from the host"
        return Move.apply(x, device)
