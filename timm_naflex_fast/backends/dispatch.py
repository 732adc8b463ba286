"""Which backend resamples the position tables: told from who is tracing.

| who calls | which backend |
| --- | --- |
| eager code, on any device | ``eager``, which reads the grids on the host, once for a batch |
| ``torch.compile`` | ``operator``: one ``torch.library`` operator, inside which ``eager`` runs |
| ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs | ``traceable``: plain operations |

Factorized tables take ``traceable`` in every graph. A strategy that ``needs_host`` takes ``eager``, and a compiled
graph breaks there; where operations are recorded or transformed it takes ``traceable``. ``patching`` decides before:
in an eager model under ``torch.func`` timm's own code runs. The path of a call::

    timm's method -> patching/timm._apply      decides whether ours runs
                  -> dispatch.add              checks the shapes, picks a backend
                  -> eager.add_batch           groups the samples, adds, tells autograd
                  -> strategy.resample         the embeddings of each grid
                  -> sparse_resize.SparseSum   the arithmetic
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..resampling import grids
from ..resampling.checks import check_tokens
from ..resampling.grids import Batch
from ..resampling.matrices import ResizeSpec
from ..strategies import STRATEGIES
from ..tracing import in_cuda_graph, recorded, refuse_in_cuda_graph, tracer
from . import eager, traceable
from .eager import Placement

FROM_HOST = 'here grids are read on the host, or copied from it, which no CUDA graph can record; mode="matmul" can be'


def add(
    x: Tensor, tables: tuple[Tensor, ...], placement: Placement, spec: ResizeSpec, strategy: str = "matmul"
) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    One table ([1,] H0, W0, C), or the two of a factorized embedding, ([1,] H0, C) and ([1,] W0, C): they are resized by
    1-D ``linear``, their sum is added, and of ``spec`` only ``ar_preserving`` and ``sampler`` count.

    Raises:
        ValueError: shapes that do not fit, or coordinates that name no cell.
        RuntimeError: ``x`` may not be changed in place.
    """
    check_tokens(x, tables[0].shape[-1], placement if isinstance(placement, Tensor) else None)
    if len(tables) == 2:
        # timm's flag takes affine positions for factorized tables in every release.
        sampler = "interpolate" if spec.sampler == "interpolate" else "affine_grid"
        spec = ResizeSpec("linear", antialias=False, ar_preserving=spec.ar_preserving, sampler=sampler)
    in_graph = recorded() or in_cuda_graph(x.device)
    backend = _backend(x, tables, strategy)
    if not isinstance(placement, Tensor) and not in_graph:
        backend = eager  # the host knows the one grid of plain images
    if backend is eager:
        add_eagerly = _add_outside_graphs if torch.compiler.is_dynamo_compiling() else eager.add
        add_eagerly(x, tables, placement, spec, STRATEGIES[strategy])
        return
    if isinstance(placement, Tensor):
        if placement.device != x.device:
            refuse_in_cuda_graph(x.device, FROM_HOST)
        backend.add(x, tables, placement, spec)
        return
    # In a graph: the embeddings of their one grid, added to all of them.
    grids.check_whole(x, placement)
    cell = torch.arange(x.shape[1], device=x.device)
    patch_coord = torch.stack((cell // placement[1], cell % placement[1]), -1)[None]  # (1, N, 2)
    one = x.new_zeros(1, *x.shape[1:])
    backend.add(one, tables, patch_coord, spec)
    x.add_(one)


# The grids are read on the host, which cannot be captured: a graph breaks here, as it does at timm's own loops.
_add_outside_graphs = torch.compiler.disable(eager.add)


def add_sizes(x: Tensor, table: Tensor, grid_sizes: Any, spec: ResizeSpec, strategy: str = "matmul") -> None:
    """As :func:`add`, for a learned table, from sizes (B, 2) as (h, w) in place of coordinates."""
    check_tokens(x, table.shape[-1])
    backend, graph = _backend(x, (table,), strategy), recorded()
    if graph and backend is eager:
        return _add_sizes_outside_graphs(x, table, grid_sizes, spec, strategy)
    if graph and isinstance(grid_sizes, Tensor):
        sizes = _sizes_in_graph(grid_sizes, x, (2,), 1, x.shape[1])
        if len(sizes) != len(x):
            raise ValueError(f"grid_sizes must hold one size for each of the {len(x)} samples; got {len(sizes)}")
    else:
        refuse_in_cuda_graph(x.device, FROM_HOST)
        listed = grids.sizes_on_host(grid_sizes, (2,), batch=len(x))
        grouped = grids.group_sizes(listed, embeds_padding=spec.embeds_padding, length=x.shape[1])
        if backend is eager:
            return eager.add_batch(x, (table,), Batch(*grouped, spec, x.dtype), STRATEGIES[strategy])
        sizes = torch.tensor(listed, device=x.device).view(-1, 3)[:, 1:]
    backend.add(x, (table,), traceable.coordinates(sizes, x.shape[1]), spec)


_add_sizes_outside_graphs = torch.compiler.disable(add_sizes)


def resample(
    table: Tensor,
    grid_sizes: Any,
    spec: ResizeSpec,
    strategy: str,
    *,
    merge: int = 1,
    length: int | None = None,
    embeds_padding: bool = False,
) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to sizes (h, w) or (t, h, w): packed (T, C), or (B, N, C) for a ``length``.

    Tokens after an image get zeros, or its first cell.
    """
    backend, graph = _backend(table, (table,), strategy), recorded()
    options: dict[str, Any] = dict(merge=merge, length=length, embeds_padding=embeds_padding)
    if graph and backend is eager:
        return _resample_outside_graphs(table, grid_sizes, spec, strategy, **options)
    if graph and isinstance(grid_sizes, Tensor):
        if length is None:
            raise ValueError("in a graph, packed embeddings need sizes on the host: give a sequence, or a length")
        sizes = _sizes_in_graph(grid_sizes, table, (2, 3), merge, length)
        return _resample_in_graph(backend, table, sizes, spec, merge, length, embeds_padding)
    refuse_in_cuda_graph(table.device, FROM_HOST)
    listed = grids.sizes_on_host(grid_sizes, (2, 3))
    groups, counts = grids.group_sizes(listed, merge=merge, length=length, embeds_padding=embeds_padding)
    if backend is eager:
        dtype = torch.promote_types(table.dtype, torch.float32)
        out = torch.zeros(sum(map(sum, counts)), table.shape[-1], dtype=table.dtype, device=table.device)
        eager.add_batch(out, (table,), Batch(groups, counts, spec, out.dtype, dtype), STRATEGIES[strategy])
        return out if length is None else out.view(len(listed), length, table.shape[-1])
    tokens = [t * h * w for t, h, w in listed]
    sizes = torch.tensor(listed, device=table.device).view(-1, 3)
    longest = max(tokens, default=0) if length is None else length
    out = _resample_in_graph(backend, table, sizes, spec, merge, longest, embeds_padding)
    if length is not None:
        return out
    return torch.cat([image[:n] for image, n in zip(out, tokens)]) if tokens else out.new_zeros(0, out.shape[-1])


_resample_outside_graphs = torch.compiler.disable(resample)


def _resample_in_graph(
    backend: ModuleType,
    table: Tensor,
    sizes: Tensor,
    spec: ResizeSpec,
    merge: int,
    length: int,
    embeds_padding: bool,
) -> Tensor:
    """The embeddings (B, N, C), by coordinates in place of groups; no size (B, 2) or (B, 3) is read back."""
    patch_coord = traceable.coordinates(sizes, length, merge)
    if not length:
        return torch.zeros(sizes.shape[0], 0, table.shape[-1], dtype=table.dtype, device=table.device)
    if backend is traceable:
        out = traceable.embeddings(table, patch_coord, spec)
    else:
        out = torch.zeros(sizes.shape[0], length, table.shape[-1], dtype=table.dtype, device=table.device)
        backend.add(out, (table,), patch_coord, spec)
    return traceable.repeat_frames(out, sizes, embeds_padding)


def _sizes_in_graph(sizes: Tensor, like: Tensor, columns: tuple[int, ...], merge: int, length: int) -> Tensor:
    """Sizes as int64 on the device of ``like``. Their shape is checked now, their values when the graph runs."""
    if sizes.ndim != 2 or sizes.shape[1] not in columns or sizes.dtype.is_floating_point or sizes.dtype is torch.bool:
        raise grids.bad_sizes(f"{sizes.dtype} {tuple(sizes.shape)}", columns)
    sizes = sizes.to(like.device, torch.int64)
    fits = (sizes > 0).all() & (sizes[:, -2:] % merge == 0).all() & (sizes.prod(1) <= length).all()
    # No number in the message: to write ``length`` into it would fix it, one graph for each length.
    torch._assert_async(fits, "grid_sizes must be at least 1, multiples of merge, and of at most ``length`` tokens")
    return sizes


def _backend(x: Tensor, tables: tuple[Tensor, ...], strategy: str) -> ModuleType:
    """The backend for coordinates: a module with a function ``add(x, tables, patch_coord, spec)``, or ``eager``."""
    who = tracer(x, *tables)
    if who == "export" or who == "transform":
        return traceable
    if STRATEGIES[strategy].needs_host:
        refuse_in_cuda_graph(x.device, FROM_HOST)
        return eager
    if who == "compile":
        if len(tables) == 2:
            return traceable
        _import_operator()
        from . import operator

        return operator
    return traceable if in_cuda_graph(x.device) else eager


# Registering operators takes longer than importing all the rest, so they are imported when a graph needs them. The
# compiler calls this while it traces: past the import hooks of other packages it could not follow the import itself.
@torch.compiler.assume_constant_result
def _import_operator() -> None:
    from . import operator  # noqa: F401
