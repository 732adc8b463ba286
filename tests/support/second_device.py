"""A second device on a CPU: tensors that call themselves CUDA's, hold real numbers, and refuse what a GPU refuses.

Inside :class:`SecondDevice`, ``.to("cuda")`` and ``device="cuda"`` make :class:`OnDevice` tensors, whose memory is the
CPU's. An operator that mixes them with tensors of the CPU raises, as on a GPU. Where the host would wait for the device
(what ``torch.cuda.set_sync_debug_mode`` finds: a number read back, a copy that blocks, a result whose size depends on
values), ``waits`` counts the line of the package that asked.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = Path(__file__).resolve().parents[2] / "timm_naflex_fast"
READS_BACK = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim}
READS_BACK |= {aten._linalg_check_errors}
TAKES_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # which may be the CPU's
FACTORIES = {getattr(torch, name) for name in "arange empty eye full linspace ones rand randn zeros tensor".split()}
FACTORIES |= {getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randn", "zeros")}


class OnDevice(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the first CUDA device."""

    held: Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        self = Tensor._make_subclass(cls, held.detach())
        self.held = held.detach()
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        own = {id(t.held if isinstance(t, cls) else t): t for t in tensors}
        held = lambda t: t.held if isinstance(t, cls) else t
        out = func(*tree_map_only(Tensor, held, args), **tree_map_only(Tensor, held, kwargs))
        return tree_map_only(Tensor, lambda t: own[id(t)] if id(t) in own else cls(t), out)


class Move(torch.autograd.Function):
    """A copy on the other device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: torch.device) -> Tensor:
        ctx.came_from = x.device
        return OnDevice(x.clone()) if to.type == "cuda" else x.held.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Move.apply(grads[0], ctx.came_from), None


waits: Counter[str] = Counter()


def wait(why: str) -> None:
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

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        waits.clear()
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:  # a mode is off while it handles ``torch.autograd.grad``
                return run_backward(*args, **kwargs)

        patch.setattr(torch.autograd, "_engine_run_backward", inside)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self.move(func, *args, **kwargs)
        if func is Tensor.tolist and isinstance(args[0], OnDevice):
            wait("tolist")
            return args[0].held.tolist()
        if func is Tensor.new_tensor and isinstance(args[0], OnDevice):
            wait("new_tensor")
            return OnDevice(torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}))
        if func is torch.nn.functional.one_hot and isinstance(args[0], OnDevice):  # for subclasses it makes an arange
            return OnDevice(func(args[0].held, *args[1:], **kwargs))
        if func is torch.nn.functional.embedding_bag and args[0].ndim == 2:  # makes offsets where this mode is off
            index = args[0]
            offsets = OnDevice(torch.arange(0, index.numel(), index.shape[1]))
            return func(index.reshape(-1), args[1], *args[3:], **{**kwargs, "offsets": offsets})
        device = kwargs.get("device")
        if func in FACTORIES and device is not None and torch.device(device).type == "cuda":
            if func is torch.tensor:
                wait("tensor")
            like = [a.held if isinstance(a, OnDevice) else a for a in args]
            asks = kwargs.pop("requires_grad", False)
            return OnDevice(func(*like, **{**kwargs, "device": CPU})).requires_grad_(asks)
        return func(*args, **kwargs)

    @staticmethod
    def move(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if func is not Tensor.to:
            args = ("cpu" if func is Tensor.cpu else "cuda",)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        if (dtype is not None and dtype != x.dtype) or kwargs.get("copy"):
            x = Tensor.to(x, dtype or x.dtype, copy=kwargs.get("copy", False))
        if device is None or device.type == x.device.type:
            return x
        if device.type == "cpu" or not non_blocking:
            wait("a copy between devices")
        assert not SecondDevice.captures, "a graph holds a copy from the host"
        return Move.apply(x, device)
