"""Which backend resamples the position tables: told from who is tracing.

| who calls | which backend |
| --- | --- |
| eager code, on any device | ``eager``, which reads the grids on the host, once for a batch |
| ``torch.compile`` | ``operator``: one ``torch.library`` operator, inside which ``eager`` runs |
| ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs | ``traceable``: plain operations |
| any graph, for plain images, whose grid its shapes tell | ``traceable.add_to_images``, for every strategy |

Factorized tables take ``traceable`` in every graph. A strategy that ``needs_host`` takes ``eager``, and a compiled
graph breaks there; where operations are recorded or transformed it takes ``traceable``. ``patching`` decides before: in
an eager model under ``torch.func`` timm's own code runs. The path of a call::

    timm's method -> patching/timm._apply      decides whether ours runs
                  -> dispatch.add              checks the shapes, picks a backend
                  -> grids.plan_batch          reads the grids, groups the samples
                  -> eager.add                 tells autograd, adds
                  -> strategy.resample         the embeddings of each grid
                  -> sparse_resize.SparseSum   the arithmetic
"""

from types import ModuleType

import torch
from torch import Tensor

from ..resampling import grids
from ..resampling.checks import check_length, check_tokens
from ..resampling.matrices import ResizeSpec
from ..strategies import Strategy
from ..tracing import Tracer, constant_while_traced, in_cuda_graph, refuse_in_cuda_graph
from . import eager, traceable
from .eager import NEEDS_HOST
from .placement import OneGrid, Sizes, row_major


def add(
    x: Tensor,
    tables: tuple[Tensor, ...],
    placement: Tensor | OneGrid | Sizes,
    spec: ResizeSpec,
    strategy: Strategy,
    traced_by: Tracer | None,
) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    One table ([1,] H0, W0, C), or the two of a factorized embedding, ([1,] H0, C) and ([1,] W0, C): they are resized by
    1-D ``linear``, their sum is added, and of ``spec`` only ``ar_preserving`` and ``reference`` count. ``placement``:
    where the tokens lie, as a tensor their coordinates (B, N, 2). ``traced_by`` is what ``tracer`` says of the tensors.

    Raises:
        ValueError: shapes that do not fit, or coordinates that name no cell.
        RuntimeError: ``x`` may not be changed in place.
    """
    check_tokens(x, tables[0].shape[-1], placement if isinstance(placement, Tensor) else None)
    if len(tables) == 2:
        # timm's flag takes affine positions for factorized tables in every release.
        reference = "interpolate" if spec.reference == "interpolate" else "affine_grid"
        spec = ResizeSpec("linear", antialias=False, ar_preserving=spec.ar_preserving, reference=reference)
    in_graph = traced_by is not None or (x.is_cuda and in_cuda_graph(x.device))
    if isinstance(placement, OneGrid):
        check_length(x, placement)
        if in_graph:
            return traceable.add_to_images(x, tables, placement, spec)
    elif in_graph:
        backend = _backend(x.device, len(tables), strategy, traced_by)
        if backend is eager:
            return _add_outside_graphs(x, tables, placement, spec, strategy, None)
        if isinstance(placement, Sizes) or placement.device != x.device:
            refuse_in_cuda_graph(x.device, NEEDS_HOST)
        return backend.add(x, tables, placement.coordinates(x) if isinstance(placement, Sizes) else placement, spec)
    if isinstance(placement, Tensor):
        plan = grids.plan_batch(x, placement, spec, strategy.resizes_square)
    else:
        plan = placement.plan(x, spec)
    eager.add(x, tables, plan, strategy)


def resample(table: Tensor, sizes: Sizes, spec: ResizeSpec, strategy: Strategy, traced_by: Tracer | None) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to ``sizes``: packed (T, C), or (B, N, C) for a ``length``.

    Tokens after an image get zeros, or its first cell.
    """
    backend = _backend(table.device, 1, strategy, traced_by)
    if backend is eager:
        return (eager.resample if traced_by is None else _resample_outside_graphs)(table, sizes, spec, strategy)
    refuse_in_cuda_graph(table.device, NEEDS_HOST)
    length = sizes.length
    tokens: list[int] = []
    if length is None:
        if isinstance(sizes.sizes, Tensor):
            raise ValueError("in a graph, packed embeddings need sizes on the host: give a sequence, or a length")
        tokens = [t * h * w for t, h, w in grids.sizes_on_host(sizes.sizes)]
        length = max(tokens, default=0)
    on_device = sizes.on_device(table, length)
    patch_coord = row_major(on_device, length, sizes.merge)
    if backend is traceable:
        out = traceable.embeddings((table,), patch_coord, spec, table.dtype)
    else:
        out = table.new_zeros(*patch_coord.shape[:2], table.shape[-1])
        backend.add(out, (table,), patch_coord, spec)
    out = traceable.repeat_frames(out, on_device, sizes.embeds_padding)
    if sizes.length is not None:
        return out
    return torch.cat([out[:0].flatten(0, 1), *(image[:n] for image, n in zip(out, tokens))])  # of no image too


def _backend(device: torch.device, tables: int, strategy: Strategy, traced_by: Tracer | None) -> ModuleType:
    """The backend for coordinates: a module with a function ``add(x, tables, patch_coord, spec)``, or ``eager``."""
    if traced_by == "export" or traced_by == "transform":
        return traceable
    if strategy.needs_host:
        refuse_in_cuda_graph(device, NEEDS_HOST)
        return eager
    if traced_by == "compile":
        if tables == 2:
            return traceable
        _import_operator()
        from . import operator

        return operator
    return traceable if device.type == "cuda" and in_cuda_graph(device) else eager


# Where the compiler reads these the graph breaks, as at timm's own loops. (``torch.compiler.disable`` would import the
# compiler here and now.)
_add_outside_graphs = torch._disable_dynamo(add)
_resample_outside_graphs = torch._disable_dynamo(eager.resample)


# Only a graph needs the operators, whose import takes longer than all the rest. The compiler calls this function and
# does not trace it: it cannot trace an import where other packages have import hooks.
@constant_while_traced
def _import_operator() -> None:
    from . import operator  # noqa: F401
