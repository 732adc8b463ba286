"""Patch-embedding kernels resampled axis by axis with two 1-D pseudo-inverses (FlexiViT, Beyer et al. 2023).

A kernel ``k`` for another patch size must answer a resized patch as the old kernel answered the original patch:
``<k', R p> = <k, p>`` for every patch p, hence ``k' = pinv(R)^T k``. timm builds ``R`` (h*w, H0*W0) and inverts it by
SVD. But resizing is separable, ``R = A_h (x) A_w``, and so is the pseudo-inverse::

    k' = pinv(A_h)^T . k . pinv(A_w)

The resize matrices of all lengths up to 64, in every mode, have full rank and a condition of at most 5.7, and the 1-D
inverses are computed in float64: results are within 6e-7 of float64 throughout (relative to the largest value, sides
4 to 48), where timm's float32 SVD reaches 1.6e-5. Where one side shrinks and the other grows, e.g. (16, 16) ->
(14, 20), ``R`` has rank min(h, H0) * min(w, W0), less than both its sides, and that SVD must tell the zeros from their
rounding; it did, on all sizes tried. So the two agree to 1e-5 for sides up to 32 and 2e-5 up to 48, with one exception:
``F.interpolate(antialias=True)`` returns wrong numbers for (N, 1, h, 1) outputs (torch 2.4 to 2.15), so for a new width
of 1 at a new height, e.g. (8, 8) -> (5, 1), timm inverts a matrix that resizes nothing, and this module the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..resampling.cache import cached, cached_resized, pinned
from ..resampling.checks import check_interpolation, check_size
from ..resampling.matrices import resize_matrix
from ..tracing import refuse_in_cuda_graph, tracer

Size = tuple[int, int]
Factors = tuple[Tensor | None, Tensor | None]  # (left, right) of ``left @ x @ right``; None keeps a side's length

# Up to this many input channels, one product with ``right (x) I`` handles all of them; it costs their number times the
# arithmetic. With more channels the kernel is transposed first, which costs two passes over memory.
MOST_INNER = 4
FIRST_CALL = (
    "the first call with such a patch size copies matrices to the GPU, which no CUDA graph can record; run the model "
    "once before you capture it"
)
NARROW = 8  # Matrices this narrow multiply two rows at once: twice the arithmetic, at three times the speed.


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a product of ``dtype`` factors is at least as exact as IEEE ``dtype``.

    This reads PyTorch's global settings and never changes them: another thread may use them.
    """
    if dtype is not torch.float32:
        return dtype
    try:
        lowered = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch refuses to answer once its per-backend flags were set
        lowered = True
    return torch.float64 if lowered else dtype


def axis_inverse(n: int, n0: int, mode: str, antialias: bool, device: torch.device | str = "cpu") -> Tensor:
    """pinv(A_n) (n0, n), float64, of the matrix that resizes a line of n0 to n."""
    matrix = resize_matrix(n, n0, mode, antialias, False, torch.float64, device)
    # It has full rank, and a condition that can be squared. ``solve`` would wait for the device, to read whether the
    # matrix was singular.
    if n < n0:
        return torch.linalg.solve_ex(matrix @ matrix.t(), matrix)[0].t().contiguous()
    return torch.linalg.solve_ex(matrix.t() @ matrix, matrix.t())[0].contiguous()


cached_inverse = cached("pseudo-inverses")(axis_inverse)


def make_factors(
    old: Size,
    new: Size,
    mode: str,
    antialias: bool,
    inner: int,
    even: bool,
    dtype: torch.dtype,
    device: torch.device,
    inverse: Callable[[int, int, str, bool], Tensor] = cached_inverse,
) -> Factors:
    """pinv(A_h)^T (h, H0) and pinv(A_w) (W0, w), the latter (x) I where ``inner`` values lie at every pixel.

    ``even``: the number of rows to be multiplied is even, so narrow matrices may take them in pairs.
    """
    left, right = (None if n == n0 else inverse(n, n0, mode, antialias) for n, n0 in zip(new, old))
    if left is not None:
        left = left.t().to(device, dtype).contiguous()
    if right is not None:
        right = torch.kron(right, torch.eye(inner, dtype=right.dtype, device=right.device)) if inner > 1 else right
        if even and min(right.shape) <= NARROW:
            right = torch.kron(torch.eye(2, dtype=right.dtype, device=right.device), right)
        right = right.to(device, dtype).contiguous()
    return left, right


@cached("kernel factors")
def factors(*key: Any) -> Factors:
    """:func:`make_factors`, cached; ``key`` ends with the device."""
    refuse_in_cuda_graph(key[-1], FIRST_CALL)
    return make_factors(*key)


def _multiply(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``left @ x @ right`` for x (N, H, W) without autocast; the cheaper side first."""
    # Autocast is asked for first because torch 2.4 cannot export the context. Compiled graphs are guarded by its state.
    device = x.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        if left is None or right is None:
            return _times_left(left, _times_right(x, right))
        (h, height), width = left.shape, x.shape[2]
        w = width * right.shape[1] // right.shape[0]
        left_first, right_first = h * width * (height + w), w * height * (width + h)
        # Where both sides are scaled alike the costs are equal, and left goes first if it shrinks (measured).
        if left_first < right_first or (left_first == right_first and h < height):
            return _times_right(_times_left(left, x), right)
        return _times_left(left, _times_right(x, right))


def _times_left(left: Tensor | None, x: Tensor) -> Tensor:
    return x if left is None else torch.bmm(left.expand(len(x), *left.shape), x)


def _times_right(x: Tensor, right: Tensor | None) -> Tensor:
    if right is None:
        return x
    rows, columns = right.shape
    return torch.mm(x.reshape(-1, rows), right).view(*x.shape[:2], x.shape[2] * columns // rows)


class _Separable(torch.autograd.Function):
    """``left @ x @ right`` as a linear function of x. Gradients take the transposed factors, as often as asked for.

    PyTorch's own backward of a product would not leave autocast, nor widen the factors where TF32 is allowed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
        ctx.factors = left, right
        return _multiply(x, left, right)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        transposed = (None if side is None else side.t().contiguous() for side in ctx.factors)
        return _separable(grads[0], *transposed), None, None


def _separable(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``left @ x @ right`` in x's dtype, forward and backward in full precision."""
    wide = product_dtype(x.dtype)
    left, right = (None if side is None else side.to(wide) for side in (left, right))
    product = _Separable.apply if torch.is_grad_enabled() and x.requires_grad else _multiply
    return product(x.to(wide), left, right).to(x.dtype)


# TorchDynamo guards a graph by the TF32 flags without our help.
_constant_product_dtype = torch.compiler.assume_constant_result(product_dtype)


def is_traced(weight: Tensor) -> bool:
    """Whether a tracer, a function transform or forward-mode AD needs PyTorch's own operations."""
    return tracer(weight) is not None


def _resample(x: Tensor, old: Size, new: Size, mode: str, antialias: bool, inner: int) -> Tensor:
    """x (N, H0, W0 * inner) to (N, h, w * inner): in float32 (or its own dtype, if wider) and back."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    key = (old, new, mode, antialias, inner)
    if torch.compiler.is_dynamo_compiling():
        # Computed within the graph: TorchDynamo cannot look into a cache. (Constants by ``assume_constant_result``
        # exclude dynamic sizes, and break torch 2.4 on a second call in one graph.)
        wide, inverse = _constant_product_dtype(dtype), partial(axis_inverse, device=x.device)
        return _multiply(x.to(wide), *make_factors(*key, False, wide, x.device, inverse)).to(x.dtype)
    product, wide = (_multiply, product_dtype(dtype)) if is_traced(x) else (_separable, dtype)
    found = pinned(factors(*key, len(x) % 2 == 0, wide, x.device), x.device)
    return product(x.to(wide), *found).to(x.dtype)


def resample_patch_kernel(
    weight: Tensor, size: tuple[int, int], *, mode: str = "bicubic", antialias: bool = True
) -> Tensor:
    """Resample convolution kernels (O, I, H0, W0) to (O, I, h, w), ``size`` = (h, w).

    Computed in float32 (float64 for float64 kernels) whatever the dtype, autocast or TF32 flags, and cast back; a
    kernel that has this size is returned unchanged. Differentiable any number of times.
    Equals ``timm.layers.patch_embed.resample_patch_embed`` within 1e-5 of the largest value (sides up to 32; beyond,
    timm's own error is larger), except for a new width of 1 at a new height, e.g. (8, 8) -> (5, 1), where timm's
    antialiased resize matrix is wrong.

    Raises:
        ValueError: weight not 4-D, size not two positive integers, or a mode that is not bilinear or bicubic.

    >>> resample_patch_kernel(torch.randn(768, 3, 16, 16), (14, 20)).shape
    torch.Size([768, 3, 14, 20])
    """
    if weight.ndim != 4:
        raise ValueError(f"weight must have shape (O, I, H0, W0); got {tuple(weight.shape)}")
    new = check_size(size)
    check_interpolation(mode)
    old = (weight.shape[2], weight.shape[3])
    if old == new:
        return weight
    kernels = weight.reshape(weight.shape[0] * weight.shape[1], *old)
    return _resample(kernels, old, new, mode, antialias, 1).view(*weight.shape[:2], *new)


def resample_linear_kernel(
    weight: Tensor, old: Size, size: Size, in_chans: int, *, channels_last: bool, mode: str, antialias: bool
) -> Tensor:
    """Resample a linear patch embedding (O, H0*W0*I), or (O, I*H0*W0) unless ``channels_last``, to ``size``."""
    new = (int(size[0]), int(size[1]))
    if not channels_last:
        kernels = weight.reshape(len(weight), in_chans, *old)
        return resample_patch_kernel(kernels, new, mode=mode, antialias=antialias).flatten(1)
    if in_chans > MOST_INNER:
        kernels = weight.reshape(len(weight), *old, in_chans).permute(0, 3, 1, 2)
        kernels = resample_patch_kernel(kernels, new, mode=mode, antialias=antialias)
        return kernels.permute(0, 2, 3, 1).flatten(1)
    if old == new:
        return weight
    x = weight.reshape(len(weight), old[0], old[1] * in_chans)
    return _resample(x, old, new, mode, antialias, in_chans).flatten(1)


def is_frozen(weight: Tensor) -> bool:
    """Whether a kernel resampled from ``weight`` may be kept: it needs no gradient and is on a CPU.

    On an accelerator the host would wait for the comparison of the bits, and resampling again costs no more.
    """
    return (
        weight.device.type == "cpu" and not (torch.is_grad_enabled() and weight.requires_grad) and not is_traced(weight)
    )


def frozen_kernel(weight: Tensor, size: Size, key: Hashable, resample: Callable[[Tensor, Size], Tensor]) -> Tensor:
    """``resample(weight, size)``, from an earlier call if ``weight`` has the same bits as then; do not write to it.

    ``key`` names whatever else the result depends on.
    """
    build = lambda copies, key: resample(copies[0], key[0])  # noqa: E731
    (kernel,) = cached_resized((weight,), [(size, "patch kernel", key)], build)
    return kernel
