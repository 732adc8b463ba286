"""Patch-embedding kernels resampled axis by axis with two 1-D pseudo-inverses.

Source: FlexiViT, Beyer et al. 2023.

A kernel ``k`` for another patch size must answer a resized patch as the old kernel answered the
original patch: ``<k', R p> = <k, p>`` for every patch p, hence ``k' = pinv(R)^T k``. timm builds
``R`` (h*w, H0*W0) and inverts it by SVD. But resizing is separable, ``R = A_h (x) A_w``, and so is
the pseudo-inverse::

    k' = pinv(A_h)^T . k . pinv(A_w)

The resize matrices of all lengths up to 64, in every mode, have full rank and a condition of at
most 5.7, and the 1-D inverses are computed in float64: results are within 6e-7 of float64
throughout (relative to the largest value, sides 4 to 48), where timm's float32 SVD reaches 1.6e-5.
Where one side shrinks and the other grows, e.g. (16, 16) -> (14, 20), ``R`` has rank min(h, H0) *
min(w, W0), less than both its sides, and that SVD must tell the zeros from their rounding; it did,
on all sizes tried. So the two agree to 1e-5 for sides up to 32 and 2e-5 up to 48, with one
exception: ``F.interpolate(antialias=True)`` returns wrong numbers for (N, 1, h, 1) outputs (torch
2.4 to 2.15), so for a new width of 1 at a new height, e.g. (8, 8) -> (5, 1), timm inverts a matrix
that resizes nothing, and this module the right one.

Tests: tests/patch_embed/test_kernels.py.
"""

import torch
from torch import Tensor

from .names import check_valid
from .pos_embed.checks import check_numbers, check_size
from .pos_embed.kept import Frozen, frozen, kept_by_arguments
from .pos_embed.precision import has_float64, is_autocast_on, unrounded_dtype, unrounded_product
from .pos_embed.table import INTERPOLATIONS, ResizeSpec, Size
from .pos_embed.weights import axis_matrix
from .tracing import backend_for, constant_while_traced, refuse_in_cuda_graph

FROM_HOST = (
    "patch kernels are resized by matrices that come from the host, which no CUDA graph can record; "
    "resize them before the capture"
)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products with ``x``, and their gradients, are computed.

    float32, or float64 for float64, and where PyTorch may round the factors of a float32 product:
    under autocast, and where TF32 is allowed; if there is float64. This reads PyTorch's global
    settings and never changes them: another thread may use them.
    """
    if is_autocast_on(x.device) or _tf32_allowed():
        return unrounded_dtype(x)
    return torch.promote_types(x.dtype, torch.float32)


@constant_while_traced  # TorchDynamo guards a graph by these flags without our help
def _tf32_allowed() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch refuses to answer once its per-backend flags were set
        return True


def axis_inverse(n: int, n0: int, spec: ResizeSpec, device: torch.device) -> Tensor:
    """pinv(A_n)^T (n, n0), float64, of the matrix that resizes a line of n0 to n."""
    a = axis_matrix(n, n0, spec, torch.float64, device)
    # It has full rank, and a condition that can be squared: the SVD of ``pinv`` costs a compiled
    # training step a tenth. ``solve`` would wait for the device, to read whether it was singular.
    is_wide = n < n0
    gram = a @ a.t() if is_wide else a.t() @ a
    inverse, _ = torch.linalg.solve_ex(gram, a, left=is_wide)
    return inverse.contiguous()  # for kron


@kept_by_arguments
def factors(
    old: Size, new: Size, channels: int, spec: ResizeSpec, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """pinv(A_h)^T (h, H0), and pinv(A_w) (x) I (W0 * channels, w * channels).

    The second handles the channels that lie at every pixel without a transposed copy of the kernel.
    """
    # In a compiled graph they are computed in every call: then where they are used.
    made_on = device if has_float64(device) else torch.device("cpu")
    rows, columns = (axis_inverse(n, n0, spec, made_on) for n, n0 in zip(new, old))
    columns = torch.kron(columns, torch.eye(channels, device=made_on)).t()
    return rows.to(dtype).to(device), columns.to(dtype).contiguous().to(device)


def _resample(kernels: Tensor, new: Size, spec: ResizeSpec) -> Tensor:
    """Resample kernels (K, H0, W0, channels) to (K, h, w, channels)."""
    refuse_in_cuda_graph(kernels.device, FROM_HOST)
    _, h0, w0, channels = kernels.shape
    dtype = product_dtype(kernels)
    # Constants of an exported graph: few of its runtimes can invert a matrix.
    rows, columns = factors((h0, w0), new, channels, spec, dtype, kernels.device)
    resized_rows = unrounded_product(rows, kernels.flatten(2).to(dtype))  # (K, h, W0 * channels)
    resized = unrounded_product(resized_rows, columns).to(kernels.dtype)
    return resized.unflatten(2, (-1, channels))


@kept_by_arguments
def _kept_kernel(weight: Frozen, new: Size, spec: ResizeSpec) -> Tensor:
    (kernels,) = weight.tensors
    return _resample(kernels, new, spec)


def resample_patch_kernel(
    weight: Tensor, size: tuple[int, int], *, mode: str = "bicubic", antialias: bool = True
) -> Tensor:
    """Resample convolution kernels (O, I, H0, W0) to (O, I, h, w), ``size`` = (h, w).

    Computed in float32 (float64 for float64 kernels) whatever the dtype, autocast or TF32 flags,
    and cast back; a kernel that has this size is returned unchanged. Differentiable any number of
    times. Equals ``timm.layers.patch_embed.resample_patch_embed`` within 1e-5 of the largest value
    (sides up to 32; beyond, timm's own error is larger), except for a new width of 1 at a new
    height, e.g. (8, 8) -> (5, 1), where timm's antialiased resize matrix is wrong.

    Raises:
        ValueError: weight not 4-D, or sparse, quantized, nested or complex; size not two positive integers, or a mode that is not bilinear
            or bicubic.

    >>> resample_patch_kernel(torch.randn(768, 3, 16, 16), (14, 20)).shape
    torch.Size([768, 3, 14, 20])
    """
    return resample_kernel(weight, size, mode, antialias, may_keep=False)


def resample_kernel(
    weight: Tensor, size: tuple[int, int], mode: str, antialias: bool, *, may_keep: bool
) -> Tensor:
    """:func:`resample_patch_kernel`, with the channels of the result where those of ``weight`` lie.

    ``may_keep``: where nothing trains, on a CPU, the result of an earlier call is taken if
    ``weight`` has the same bits as then: do not write to it. On an accelerator the host would wait
    for the comparison, and resampling again costs no more.
    """
    check_numbers(weight, "weight")
    if weight.ndim != 4:
        raise ValueError(f"weight must have shape (O, I, H0, W0); got {tuple(weight.shape)}")
    new = check_size(size)
    check_valid("mode", mode, INTERPOLATIONS)
    outputs, inputs, h0, w0 = weight.shape
    if (h0, w0) == new:
        return weight

    # The kernels of a linear layer have their channels side by side at each pixel. To bring them
    # into another order, and back, would cost two copies.
    kernels = weight.permute(0, 2, 3, 1)
    is_by_pixel = kernels.is_contiguous()
    if not is_by_pixel:
        kernels = weight.reshape(-1, h0, w0, 1)
    spec = ResizeSpec(mode, antialias)

    trains = torch.is_grad_enabled() and weight.requires_grad
    known = None
    if may_keep and not trains and weight.is_cpu and backend_for(weight) == "eager":
        known = frozen((kernels,), [new])
    resized = _resample(kernels, new, spec) if known is None else _kept_kernel(known, new, spec)
    if is_by_pixel:
        return resized.permute(0, 3, 1, 2)
    return resized.view(outputs, inputs, *new)
