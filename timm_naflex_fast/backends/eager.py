"""The backend that reads the grids on the host: any strategy, on a CPU or CUDA.

For each group of the plan it lets the strategy resample the tables, adds the embeddings to the
tokens, and tells autograd how to go back. ``AddedInPlace`` is one node for the whole batch: the
gradient of the tokens passes through untouched, and is read once for the tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..batch.layout import Coordinates, Sizes
from ..batch.plan import Plan
from ..batch.tokens import AddedInPlace, Tokens, assemble
from ..resampling import dense, kept, sparse
from ..resampling.dense import Embeddings
from ..resampling.spec import ResizeSpec, Size
from ..strategies import Strategy, Tables
from ..tracing import refuse_in_cuda_graph, why_unsupported

NEEDS_HOST = (
    "here grids are read on the host, which no CUDA graph can record; in a graph by coordinates "
    "nothing is read"
)


def resample(table: Tensor, sizes: Sizes, spec: ResizeSpec, strategy: Strategy) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to ``sizes``; see ``dispatch.resample``."""
    plan = sizes.plan(table, spec)
    tokens = sum(in_grid + after for in_grid, after in plan.counts)
    channels = table.shape[-1]
    out = torch.zeros(tokens, channels, dtype=table.dtype, device=table.device)
    add_plan(out, (table,), plan, strategy)
    if sizes.length is None:
        return out
    return out.view(len(sizes.values), sizes.length, channels)


def add_plan(x: Tensor, tables: Tables, plan: Plan, strategy: Strategy) -> None:
    """Add the tables, resampled to each group's grid, into ``x`` (B, N, C) or packed (T, C).

    Autograd checks before the first write; the embeddings come later, one grid at a time.
    """
    if not plan.groups or not x.shape[-1]:
        return
    if x.device.type not in ("cpu", "cuda"):
        # Autograd derives what the strategy computes there.
        _add_at_once(x, _resample(tables, plan.groups, plan, strategy), plan)
        return
    trains = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
    watched = kept.watched()
    _before_writing(x, tables if trains else (), plan, watched=watched)

    with torch.no_grad():
        # On an accelerator nothing is kept: the host would wait for the comparison, and the sums
        # cost no more.
        if trains or watched or not tables[0].is_cpu:
            embeddings = _resample(tables, plan.groups, plan, strategy)
        else:
            embeddings = _kept_embeddings(tables, plan, strategy)
        if watched:
            _add_at_once(x, embeddings, plan)
            return
        tokens = Tokens(x, plan.counts)
        for size, of_grid in embeddings:
            tokens.add(plan.groups[size], of_grid)


def _before_writing(x: Tensor, trained: Tables, plan: Plan, *, watched: bool) -> None:
    """Tell who has to know that ``x`` changes: autograd may forbid it."""
    if trained:
        kept.forget(*trained)
    if watched:
        # ``allow_mutation_on_saved_tensors`` copies ``x`` at the first write, and looks it up as it
        # was saved: this has to come before autograd hears of the change.
        with torch.no_grad():
            x[:1, :1].add_(-0.0)
    if trained or (x.requires_grad and torch.is_grad_enabled()):
        axes = 3 if len(trained) == 1 else 2
        shapes = [table.shape[-axes:] for table in trained]
        AddedInPlace.apply(x, partial(_gradients, shapes, plan), *trained)


def _add_at_once(x: Tensor, embeddings: Embeddings, plan: Plan) -> None:
    """One write to ``x`` itself: a selective checkpoint may hand back views of an earlier x."""
    cast = ((plan.groups[size], of_grid.to(x.dtype)) for size, of_grid in embeddings)
    x.add_(assemble(cast, plan.counts).view(x.shape))


def gradient(
    g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec
) -> Tensor:
    """The gradient (H0, W0, C) of a learned table from that of the tokens (B, N, C).

    It is in float32 at least.
    """
    dtype = torch.promote_types(g.dtype, torch.float32)
    plan = Coordinates(patch_coord).plan(g, spec)._replace(dtype=dtype)
    if not plan.groups:
        return g.new_zeros(table_shape, dtype=dtype)
    return _gradients([table_shape], plan, g)[0]


def _resample(tables: Tables, sizes: Iterable[Size], plan: Plan, strategy: Strategy) -> Embeddings:
    """The embeddings of these sizes, as the plan wants them."""
    return strategy.resample(tables, sizes, plan.spec, plan.dtype, plan.token_dtype)


def _kept_embeddings(tables: Tables, plan: Plan, strategy: Strategy) -> Embeddings:
    """The embeddings of tables that need no gradient: those of a grid that comes again are kept.

    If that costs less: to compare a table costs two reads of each of its cells; to sum, about eight
    reads of each cell of a grid.
    """
    met = kept.met_keys(tables)
    # A grid of a learned table's own size takes the table as it is: nothing is kept, nothing
    # compared.
    own_size = None
    if len(tables) == 1 and not plan.spec.use_grid_sample:
        own_size = tables[0].shape[-3:-1]
    again: dict[Any, Size] = {}
    others = []
    for size in plan.groups:
        key = (size, strategy, plan.spec, plan.token_dtype, plan.dtype)
        if key in met and size != own_size:
            again[key] = size
        else:
            others.append(size)
            met.setdefault(key)

    cells_read = 8 * sum(h * w for h, w in again.values())
    cells_compared = 2 * tables[0].shape[-3:-1].numel() if len(tables) == 1 else 0
    if cells_compared >= cells_read:
        return _resample(tables, plan.groups, plan, strategy)
    found = _take_kept(tables, again, plan, strategy)
    if not others:
        return found
    return chain(found, _resample(tables, others, plan, strategy))


def _take_kept(
    tables: Tables, again: dict[Any, Size], plan: Plan, strategy: Strategy
) -> Iterator[tuple[Size, Tensor]]:
    """The embeddings of the sizes that came before, by their keys."""

    def resample_one(copies: Tables, key: Any) -> Tensor:
        ((_, of_grid),) = _resample(copies, [again[key]], plan, strategy)
        return of_grid.to(plan.token_dtype)

    return zip(again.values(), kept.kept_of(tables, list(again), resample_one))


def _gradients(shapes: Sequence[Sequence[int]], plan: Plan, g: Tensor) -> Sequence[Tensor]:
    """The gradients of tables of these shapes from that of the tokens ``g``."""
    refuse_in_cuda_graph(g.device, NEEDS_HOST)
    if not plan.counts:  # an empty batch of plain images
        return [g.new_zeros(shape) for shape in shapes]
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        return _gradients_by_autograd(shapes, plan, g)

    dtype = torch.promote_types(plan.dtype, g.dtype)
    with torch.no_grad():
        tokens = Tokens(g.detach(), plan.counts)

        def gradient_of(size: Size) -> Tensor:
            return tokens.sum(plan.groups[size], dtype)

        if len(shapes) == 2:
            return dense.factorized_gradients(plan.groups, gradient_of, shapes, plan.spec, g.device)
        return [sparse.gradient(plan.groups, gradient_of, shapes[0], plan.spec, dtype, g.device)]


def _gradients_by_autograd(
    shapes: Sequence[Sequence[int]], plan: Plan, g: Tensor
) -> Sequence[Tensor]:
    """The same by the definition, float64, which PyTorch can derive again."""
    with torch.enable_grad():
        tables = [
            torch.zeros(*shape, dtype=torch.float64, device=g.device, requires_grad=True)
            for shape in shapes
        ]
        if len(tables) == 1:
            embeddings = dense.resample(tables[0], plan.groups, plan.spec)
        else:
            embeddings = dense.resample_factorized(tables, plan.groups, plan.spec, torch.float64)
        of_groups = ((plan.groups[size], of_grid) for size, of_grid in embeddings)
        tokens = assemble(of_groups, plan.counts).view(g.shape)
    return torch.autograd.grad(tokens, tables, g.double(), create_graph=torch.is_grad_enabled())
