"""Who records or transforms what this thread computes. Every room asks here.

PyTorch's own ``torch.compiler.is_compiling()`` is one flag for the whole process: it is also true in a thread that
merely runs a model while another thread compiles. So this file asks what belongs to the thread.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Tracer = Literal["compile", "export", "transform"]


def tracer() -> Tracer | None:
    """Who needs more than the numbers of the operations that follow; None: nobody, this is plain eager code.

    - ``"compile"``: TorchDynamo reads this code for ``torch.compile``.
    - ``"export"``: somebody records PyTorch's operations, for any input: ``torch.export``, ``torch.jit.trace``,
      ``make_fx``, ``FakeTensorMode``. Nothing may be read on the host, nor may a number be kept from another call.
    - ``"transform"``: a ``torch.func`` transform, in a compiled function also forward-mode differentiation. (In eager
      code :func:`why_unsupported` asks the tensors whether they have a tangent.)
    """
    if torch.compiler.is_dynamo_compiling():  # true in the code that TorchDynamo reads, and nowhere else
        if _exporting():
            return "export"
        return "transform" if _transforming_while_traced() else "compile"
    if torch.jit.is_tracing() or _recording():
        return "export"
    return "transform" if _in_torch_func() else None


def recorded() -> bool:
    """Whether the operations that follow become a graph, so that no number can be read on the host."""
    return torch.compiler.is_dynamo_compiling() or tracer() == "export"


def _in_torch_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# The compiler reads no C function, but calls this one while it traces, when the transforms around it are active.
@torch.compiler.assume_constant_result
def _transforming_while_traced() -> bool:
    return _in_torch_func() or torch.autograd.forward_ad._current_level >= 0


def _exporting() -> bool:
    """Whether TorchDynamo traces for ``torch.export``; where PyTorch cannot tell (2.4), every compiler counts."""
    # The flag behind ``is_exporting``: Dynamo of torch 2.11 takes the call for true under torch.compile as well.
    return getattr(torch.compiler, "_is_exporting_flag", False) if hasattr(torch.compiler, "is_exporting") else True


def _recording() -> bool:
    """Whether this thread's operations are written down (``make_fx``) or run without numbers (``FakeTensorMode``)."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.PROXY, kinds.FAKE))


def why_unsupported(*tensors: Tensor) -> str | None:
    """Why our in-place sums cannot take these tensors, in words; None if they can.

    Where they cannot, PyTorch's own operations have to run: a library's own code, or ``backends/portable.py``.
    """
    if recorded():
        return None  # the tracer's tensors are not looked at: what it records can be differentiated and batched
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a tensor of the class {type(tensor).__name__}"
        if tensor.device.type == "meta":
            return "a meta tensor"
        if torch._C._functorch.is_legacy_batchedtensor(tensor):
            return "a batch of gradients"
    if _in_torch_func():
        return "a torch.func transform"
    # The level is one for the process; whether a tensor has a tangent belongs to the tensor.
    if torch.autograd.forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        return "forward-mode differentiation"
    return None


def _has_tangent(tensor: Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
