"""Which backend resamples the position tables: told from who is tracing.

| who calls | which backend |
| --- | --- |
| eager code, on any device | ``eager``, which reads the grids on the host, once for a batch |
| ``torch.compile`` | ``operator``: one ``torch.library`` operator, inside which ``eager`` runs |
| ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs | ``traceable``: plain operations |
| any graph, for plain images, whose grid its shapes tell | ``traceable.add_to_images``, for every strategy |

Factorized tables take ``traceable`` in every graph. A strategy with ``breaks_graph`` takes
``eager``, and a compiled graph breaks there; where operations are recorded or transformed it takes
``traceable``. ``patching`` decides before: in an eager model under ``torch.func`` timm's own code
runs. The path of a call::

    timm's method -> patching/timm._apply      decides whether ours runs
                  -> dispatch.add              checks the shapes, picks a backend
                  -> eager.add_batch           reads the grids, groups the samples: grids.plan_batch
                  -> eager.add_plan            tells autograd, adds
                  -> strategy.resample         the embeddings of each grid
                  -> sparse.SparseSum   the arithmetic
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..batch import grids
from ..batch.checks import check_length, check_tokens, check_writable
from ..batch.layout import OneGrid, OnInvalid, Sizes, TokenLayout, row_major
from ..resampling.matrices import ResizeSpec
from ..strategies import Strategy
from ..strategies.base import Tables
from ..tracing import Context, constant_while_traced, context_of
from . import eager, traceable
from .eager import NEEDS_HOST

AddByCoordinates = Callable[[Tensor, Tables, Tensor, ResizeSpec], None]
FROM_HOST = "sizes are copied from the host, which no CUDA graph can record; give coordinates on the device of x"


def add(
    x: Tensor,
    tables: Tables,
    layout: TokenLayout,
    spec: ResizeSpec,
    strategy: Strategy,
    context: Context,
    on_invalid: OnInvalid = None,
) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    One table ([1,] H0, W0, C), or the two of a factorized embedding, ([1,] H0, C) and ([1,] W0, C):
    they are resized by 1-D ``linear``, and their sum is added. ``layout``: where the tokens lie; a
    tensor holds coordinates (B, N, 2). ``context``: what ``context_of`` says of the tensors.
    ``on_invalid`` is called, in eager code, in place of an ``InvalidCoordinateError``.

    Raises:
        ValueError: shapes that do not fit, or coordinates that name no cell.
        RuntimeError: ``x`` may not be changed in place.
    """
    check_tokens(x, tables[0].shape[-1], layout if isinstance(layout, Tensor) else None)
    if isinstance(layout, OneGrid):
        check_length(x, layout)
    if context is None:
        check_writable(x)
        eager.add_batch(x, tables, layout, spec, strategy, on_invalid)
    elif isinstance(layout, OneGrid):
        traceable.add_to_images(x, tables, layout, spec)
    elif not (strategy.breaks_graph and context == "compile"):
        add_by_coordinates = _backend(len(tables), strategy, context)
        if context == "capture" and (isinstance(layout, Sizes) or layout.device != x.device):
            raise RuntimeError(FROM_HOST)
        add_by_coordinates(
            x, tables, layout.coordinates(x) if isinstance(layout, Sizes) else layout, spec
        )
    else:
        _add_outside_graphs(x, tables, layout, spec, strategy)


def resample(
    table: Tensor, sizes: Sizes, spec: ResizeSpec, strategy: Strategy, context: Context
) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to ``sizes``: packed (T, C), or (B, N, C) for a
    ``length``.

    Tokens after an image get zeros, or its first cell.
    """
    if context is None:
        return eager.resample(table, sizes, spec, strategy)
    if strategy.breaks_graph and context == "compile":
        return _resample_outside_graphs(table, sizes, spec, strategy)
    add_by_coordinates = _backend(1, strategy, context)
    if context == "capture":
        raise RuntimeError(FROM_HOST)
    length = sizes.length
    if length is None:
        if isinstance(sizes.values, Tensor):
            raise ValueError(
                "in a graph, packed embeddings need sizes on the host: give a sequence, or a length"
            )
        tokens = [t * h * w for t, h, w in grids.sizes_on_host(sizes.values)]
        length = max(tokens, default=0)
    on_device = sizes.on_device(table, length)
    patch_coord = row_major(on_device, length, sizes.merge)
    if add_by_coordinates is traceable.add:
        out = traceable.embeddings((table,), patch_coord, spec, table.dtype)
    else:
        out = table.new_zeros(*patch_coord.shape[:2], table.shape[-1])
        add_by_coordinates(out, (table,), patch_coord, spec)
    out = traceable.repeat_frames(out, on_device, sizes.embeds_padding)
    if sizes.length is not None:
        return out
    return torch.cat(
        [out[:0].flatten(0, 1), *(image[:n] for image, n in zip(out, tokens))]
    )  # of no image too


def _backend(tables: int, strategy: Strategy, context: Context) -> AddByCoordinates:
    """The function of a graph's backend that adds tables by coordinates."""
    if strategy.breaks_graph and context == "capture":
        raise RuntimeError(NEEDS_HOST)
    if context != "compile" or tables == 2:
        return traceable.add
    _import_operator()
    from . import operator

    return operator.add


# Where the compiler reads these the graph breaks, as at timm's own loops.
# (``torch.compiler.disable`` would import the compiler here and now.)
@torch._disable_dynamo
def _add_outside_graphs(
    x: Tensor, tables: Tables, layout: TokenLayout, spec: ResizeSpec, strategy: Strategy
) -> None:
    add(x, tables, layout, spec, strategy, context_of(x))


_resample_outside_graphs = torch._disable_dynamo(eager.resample)


# Only a graph needs the operators, whose import takes longer than all the rest. The compiler calls
# this function and does not trace it: it cannot trace an import where other packages have import
# hooks.
@constant_while_traced
def _import_operator() -> None:
    from . import operator  # noqa: F401
