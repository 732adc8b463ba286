"""Who records or transforms what this thread computes. Every folder of this package asks here.

PyTorch's own ``torch.compiler.is_compiling()`` is one flag for the whole process: it is also true
in a thread that merely runs a model while another thread compiles. So this file asks what belongs
to the thread, wherever PyTorch tells.

Tests: tests/behaviour/test_transforms.py.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

Backend = Literal["eager", "operator", "plain"]
OWN_MEMORY: tuple[type, ...] = (Tensor, torch.nn.Parameter)  # the classes whose memory is their own
Function = TypeVar("Function", bound=Callable[..., Any])


def backend_for(*tensors: Tensor) -> Backend:
    """What computes with these tensors.

    - ``"eager"``: code that may read the host and keep numbers.
    - ``"operator"``: as one operator. TorchDynamo reads this code for ``torch.compile``, or a mode
      watches what runs (see :func:`watcher`).
    - ``"plain"``: by PyTorch's plain operations, and nothing may be read on the host, nor may a
      number be kept from another call. Somebody records them for any input (``torch.export``,
      ``torch.jit.trace``, ``make_fx``, ``FakeTensorMode``, a CUDA graph) or transforms them
      (``torch.func``, forward-mode differentiation, also inside a compiled function), or our
      in-place sums cannot take ``tensors`` (see :func:`why_unsupported`), or the first of them lies
      neither on a CPU nor on a CUDA device.
    """
    device = tensors[0].device
    if device.type not in ("cpu", "cuda"):
        return "plain"
    if torch.compiler.is_dynamo_compiling():  # only in the code that TorchDynamo reads
        # The flag behind ``is_exporting``: Dynamo of torch 2.11 takes the call for true under
        # torch.compile, too. torch before 2.7 has neither: there every compiler counts.
        if getattr(torch.compiler, "_is_exporting_flag", True) or _transforming_while_traced():
            return "plain"
        return "operator"
    who = watcher()
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if who == "tracer" or is_captured or _refused(tensors) is not None:
        return "plain"
    return "operator" if who == "mode" else "eager"


def watcher() -> Literal["tracer", "mode"] | None:
    """Who sees the operations of this thread.

    - ``"tracer"``: they become a graph (not a CUDA graph), so no number can be read. Modes and keys are
      the thread's own: one mode writes operations down (``make_fx``), one runs them without numbers,
      and the key says that a third writes them down before autograd.
    - ``"mode"``: a selective checkpoint, a counter of FLOPs. A default device is a mode too, and
      harmless: what is built here names its devices.
    """
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or _has_key(_PRE_DISPATCH):
        return "tracer"
    if torch._C._len_torch_dispatch_stack():
        is_tracer = _mode(_PROXY) is not None or _mode(_FAKE) is not None
        return "tracer" if is_tracer else "mode"
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                return "mode"
    return None


def is_exported() -> bool:
    """Whether ``torch.export`` or an ONNX exporter records this thread: it will run elsewhere.

    torch 2.4 to 2.6 do not tell ``torch.export`` from other tracers.
    """
    exports = getattr(torch.compiler, "_is_exporting_flag", False) or torch.onnx.is_in_onnx_export()
    return exports and watcher() == "tracer"


# PyTorch has no public question for these. All are there in torch 2.4, the oldest that is served,
# to 2.15; so are ``_functorch.peek_interpreter_stack`` and ``is_legacy_batchedtensor`` below.
_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_has_key = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def constant_while_traced(function: Function) -> Function:
    """A decorator: the compiler calls the function as it reads a call of it, and takes the result.

    PyTorch's own ``torch.compiler.assume_constant_result`` marks it alike, but imports the compiler
    to do so (2 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler reads no C function, but calls this one while it traces, when the transforms around
# it are active.
@constant_while_traced
def _transforming_while_traced() -> bool:
    in_functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return in_functorch or forward_ad._current_level >= 0


def in_cuda_graph(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. It keeps addresses, and can hold no copy from or to
    the host."""
    if device.type != "cuda" or watcher() == "tracer":
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_in_cuda_graph(device: torch.device, why: str) -> None:
    """Raise a RuntimeError that says ``why`` if a CUDA graph is being captured.

    PyTorch before 2.11 copies from memory of the host even so, and the graph reads it again when it
    is long free.
    """
    if in_cuda_graph(device):
        raise RuntimeError(f"timm_naflex_fast: {why}")


def why_unsupported(*tensors: Tensor) -> str | None:
    """Why our in-place sums cannot take these tensors, in words; None if they can.

    Where they cannot, PyTorch's own operations have to run: a library's own code, or
    ``pos_embed/graphs.py``.
    """
    if watcher() == "tracer":
        # What is recorded can be differentiated and batched, and tracers have classes of their own.
        return "a tensor of the class DTensor" if any(map(is_dtensor, tensors)) else None
    return _refused(tensors)


def _refused(tensors: tuple[Tensor, ...]) -> str | None:
    """:func:`why_unsupported`, where nothing is traced."""
    for tensor in tensors:
        if type(tensor) not in OWN_MEMORY:
            return f"a tensor of the class {type(tensor).__name__}"
        if tensor.is_meta:
            return "a meta tensor"
        if torch._C._functorch.is_legacy_batchedtensor(tensor):
            return "a batch of gradients"
        # The level is one for the process; whether a tensor has a tangent belongs to the tensor.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            return "forward-mode differentiation"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform"
    return None


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is spread over the ranks of a device mesh.

    Told by what it has: to import the class takes long.
    """
    if torch.compiler.is_dynamo_compiling() and not hasattr(torch.compiler, "is_exporting"):
        return False  # the compiler of torch 2.4 cannot answer
    return hasattr(tensor, "device_mesh")
