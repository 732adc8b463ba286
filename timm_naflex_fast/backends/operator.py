"""Any strategy as two ``torch.library`` operators: one graph under ``torch.compile``.

A compiled graph cannot look at the values of coordinates, and ``traceable``, which needs none, is
many times slower. So the graph holds one operator, inside which ``eager`` runs. It reads the grids
on the host, so CUDA graphs leave it out. A mode that watches operators sees one call, whatever is
kept inside.
"""

import re
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..batch.tokens import check_tokens, runs_of
from ..resampling.spec import ResizeSpec
from ..resampling.tables import PositionTable, whole
from ..strategies import STRATEGIES
from ..tracing import why_unsupported
from . import eager

# How the table is resampled: the strategy's name, and before it the fields of ``ResizeSpec``.
OPTIONS = (
    "str interpolation, bool antialias, bool align_corners, bool ar_preserving, str reference, "
    "bool embeds_padding, str strategy"
)

# The compiler keeps graphs on disk, with the backward pass in them, and finds them by the names of
# their operators: after an update, that of the release before would go on.
_RELEASE = re.sub(r"\W", "_", __version__)

_options: dict[str, Any] = dict(mutates_args=())
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _options["tags"] = (torch.Tag.cudagraph_unsafe,)


def add(
    x: Tensor, table: PositionTable, patch_coord: Tensor, spec: ResizeSpec, strategy: str
) -> None:
    """Add the table, resampled to each sample's grid, into ``x`` (B, N, C) in place."""
    cells = whole(table)
    if len(table) == 2:  # as one table they are no longer what timm's own calls resize
        strategy = "matmul"
    trains = cells.requires_grad and torch.is_grad_enabled()
    total, _ = add_learned(x, cells, patch_coord, trains, *spec, strategy)
    x.copy_(total)  # the compiler removes this copy


@torch.library.custom_op(
    f"timm_naflex_fast::add_learned_{_RELEASE}",
    schema=f"(Tensor x, Tensor table, Tensor coord, bool trains, {OPTIONS}) -> (Tensor, Tensor)",
    **_options,
)
def add_learned(
    x: Tensor, table: Tensor, patch_coord: Tensor, trains: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    """``x`` plus the table, and a copy of the coordinates for the backward pass."""
    check_tokens(x, table.shape[-1], patch_coord)
    strategy = STRATEGIES[options[-1]]
    out = x.clone(memory_format=torch.contiguous_format)
    spec = ResizeSpec(*options[:-1])
    runs = runs_of(patch_coord, out, spec.embeds_padding)
    eager.add_runs(out, (table.detach(),), runs, spec, strategy, may_keep=not trains)
    return out, patch_coord.clone()


def gradient(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *options: Any) -> Tensor:
    """The table's gradient (rows, cols, C), float32 at least; the same for every strategy."""
    shape = (rows, cols, g.shape[-1])
    spec = ResizeSpec(*options[:-1])
    runs = runs_of(patch_coord, g, spec.embeds_padding)
    return eager.gradient(shape, runs, spec, g)


learned_grad = torch.library.custom_op(
    f"timm_naflex_fast::learned_grad_{_RELEASE}",
    gradient,
    schema=f"(Tensor g, Tensor coord, SymInt rows, SymInt cols, {OPTIONS}) -> Tensor",
    **_options,
)


@add_learned.register_fake
def _fake_add(x: Tensor, table: Tensor, patch_coord: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(patch_coord)


@learned_grad.register_fake
def _fake_grad(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *options: Any) -> Tensor:
    return g.new_empty(rows, cols, g.shape[-1], dtype=torch.promote_types(g.dtype, torch.float32))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, table, _, _, *ctx.options = inputs
    ctx.rows, ctx.cols, _ = table.shape
    # The copy: the caller may fill the coordinates themselves with those of the next batch.
    _, patch_coord = output
    ctx.save_for_backward(patch_coord)


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    # Autograd adds the zeros of the copy in ``add`` to this gradient. Inductor removes that sum and
    # gives its strides, contiguous ones, to what is left, which would be the graph's input.
    g = g.contiguous()
    grad_table = None
    if ctx.needs_input_grad[1]:
        (patch_coord,) = ctx.saved_tensors
        # An operator cannot be derived. In eager code, in sight of a mode, it may have to be.
        is_derived = g.requires_grad or why_unsupported(g)
        gradient_of = gradient if is_derived else learned_grad
        grad_table = gradient_of(g, patch_coord, ctx.rows, ctx.cols, *ctx.options)
    return g, grad_table, None, None, *[None] * len(ctx.options)


add_learned.register_autograd(_backward, setup_context=_setup)
