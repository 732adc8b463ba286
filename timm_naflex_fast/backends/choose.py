"""Which form of the matmul strategy serves a NaFlex batch: told from who is tracing, and from where the tensors are.

- ``torch.export``: plain tensor operations (``exported``), which run without this package;
- ``torch.compile``: one ``torch.library`` operator, inside which one of the forms below runs;
- eager on CUDA: ``matmul_triton``, where Triton can serve: nothing is read on the host;
- eager elsewhere: ``matmul``, which reads the grids on the host.

Factorized tables take the plain operations in every graph and on CUDA, ``matmul`` elsewhere.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..resampling import exact as matmul
from ..resampling import grid_sample, interpolate
from ..resampling.grids import check_coord, check_tokens, group_grids, whole_batch
from ..resampling.matrices import Resampling
from . import exported
from . import triton as matmul_triton

Where = Tensor | tuple[int, int]
"""Coordinates (B, N, 2) of a NaFlex batch, or the grid (h, w) of every sample of a plain one."""


def add_learned(x: Tensor, table: Tensor, where: Where, how: Resampling, strategy: str = "matmul") -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place."""
    check_tokens(x, table.shape[-1])
    if not isinstance(where, Tensor):
        return {"interpolate_cached": interpolate, "matmul": matmul}[strategy].add_learned(
            x, table, whole_batch(x, where), how
        )
    check_coord(where, x)
    if how.sampler != "interpolate":
        return grid_sample.add_learned(x, table, where, how, dense_positions=how.sampler == "affine_grid")
    if strategy == "interpolate_cached":
        return _add_learned_cached(x, table, where, how)
    form = learned_form(x, table)
    if form is matmul:
        matmul.add_learned(x, table, group_grids(where, x), how)
    else:
        form.add_learned(x, table, where, how)


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, where: Where, how: Resampling, strategy: str = "matmul"
) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place.

    Of ``how`` only ``ar_preserving`` and ``sampler`` count.
    """
    check_tokens(x, table_y.shape[-1])
    if not isinstance(where, Tensor):
        return {"interpolate_cached": interpolate, "matmul": matmul}[strategy].add_factorized(
            x, table_y, table_x, whole_batch(x, where), how.ar_preserving
        )
    check_coord(where, x)
    if how.sampler != "interpolate":
        return grid_sample.add_factorized(x, table_y, table_x, where, how.ar_preserving)
    if strategy == "interpolate_cached":
        return _add_factorized_cached(x, table_y, table_x, where, how.ar_preserving)
    if torch.compiler.is_compiling() or x.is_cuda:
        exported.add_factorized(x, table_y, table_x, where, how.ar_preserving)
    else:
        matmul.add_factorized(x, table_y, table_x, group_grids(where, x), how.ar_preserving)


def unusual(*tensors: Tensor) -> str | None:
    """Why our autograd functions cannot take these tensors, so that the library's own code must run; None: they can."""
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
            return f"a tensor of the class {type(x).__name__}"
        if x.device.type == "meta":
            return "a meta tensor"
    if not torch.compiler.is_compiling():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a torch.func transform"
        if torch.autograd.forward_ad._current_level >= 0:
            return "forward-mode differentiation"
    return None


calls: Counter[tuple[str, str]] = Counter()
"""How often each (step, who served it) ran: ("pos_embed", "matmul"), ("pos_embed", "stock"), ..."""
fallbacks: Counter[str] = Counter()
"""How often a library's own code ran although something else was chosen, by reason."""


# Finished tables are looked up by the grids, which cannot be captured: under torch.compile these two are a graph
# break, as timm's own loops are.


@torch.compiler.disable
def _add_learned_cached(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    interpolate.add_learned(x, table, group_grids(patch_coord, x), how)


@torch.compiler.disable
def _add_factorized_cached(
    x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, ar_preserving: bool
) -> None:
    interpolate.add_factorized(x, table_y, table_x, group_grids(patch_coord, x), ar_preserving)


def learned_form(x: Tensor, table: Tensor) -> Any:
    """What has the ``add_learned`` that serves."""
    if exporting():
        return exported
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
