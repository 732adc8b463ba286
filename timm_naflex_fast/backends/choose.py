"""Which form of the matmul strategy serves a NaFlex batch: told from who is tracing, and from where the tensors are.

- ``torch.export``: plain tensor operations (``matmul_traceable``), which run without this package;
- ``torch.compile``: one ``torch.library`` operator, inside which one of the forms below runs;
- eager on CUDA: ``matmul_triton``, where Triton can serve: nothing is read on the host;
- eager elsewhere: ``matmul``, which reads the grids on the host.

Factorized tables take the plain operations in every graph and on CUDA, ``matmul`` elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..resampling import exact as matmul
from ..resampling.grids import check_coord, group_grids
from ..resampling.matrices import Resampling
from . import exported as matmul_traceable
from . import triton as matmul_triton


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place."""
    check_coord(patch_coord, x)
    form = learned_form(x, table)
    if form is matmul:
        matmul.add_learned(x, table, group_grids(patch_coord, x), how)
    else:
        form.add_learned(x, table, patch_coord, how)


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, ar_preserving: bool = False
) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place."""
    check_coord(patch_coord, x)
    if torch.compiler.is_compiling() or x.is_cuda:
        matmul_traceable.add_factorized(x, table_y, table_x, patch_coord, ar_preserving)
    else:
        matmul.add_factorized(x, table_y, table_x, group_grids(patch_coord, x), ar_preserving)


def learned_form(x: Tensor, table: Tensor) -> Any:
    """What has the ``add_learned`` that serves."""
    if exporting():
        return matmul_traceable
    kernels = matmul_triton.serves(x, table)
    if torch.compiler.is_compiling():
        from . import compiled as operator  # registering operators takes longer than importing all the rest

        return operator.triton if kernels else operator.eager
    return matmul_triton if kernels else matmul


def exporting() -> bool:
    """Whether ``torch.export`` is tracing; where PyTorch is too old to tell, any tracing counts."""
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling()
