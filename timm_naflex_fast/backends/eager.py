"""The backend that reads the grids on the host: any strategy, on a CPU or CUDA.

For each group of the plan it lets the strategy resample the tables, adds the embeddings to the
tokens, and tells autograd how to go back. ``AddedInPlace`` is one node for the whole batch: the
gradient of the tokens passes through untouched, and is read once for the tables.

``tests/contract/test_backends.py`` compares it with timm, and ``test_frozen_tables.py`` there what
is kept.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..batch.layout import Sizes
from ..batch.plan import Plan
from ..batch.tokens import AddedInPlace, Tokens, assemble
from ..resampling import kept
from ..resampling.spec import ResizeSpec, Size
from ..resampling.tables import LearnedTable, Tables
from ..strategies import Strategy
from ..tracing import refuse_in_cuda_graph, why_unsupported

NEEDS_HOST = (
    "here grids are read on the host, which no CUDA graph can record; in a graph by coordinates "
    "nothing is read"
)


def resample(table: LearnedTable, sizes: Sizes, spec: ResizeSpec, strategy: Strategy) -> Tensor:
    """The table resampled to ``sizes``; see ``dispatch.resample``."""
    plan = sizes.plan(table.tensors[0], spec)
    tokens = sum(in_grid + after for in_grid, after in plan.counts)
    device = table.tensors[0].device
    out = torch.zeros(tokens, table.channels, dtype=plan.resampling.token_dtype, device=device)
    add_plan(out, table, plan, strategy)
    if sizes.length is None:
        return out
    return out.view(len(sizes.values), sizes.length, table.channels)


def add_plan(x: Tensor, tables: Tables, plan: Plan, strategy: Strategy) -> None:
    """Add the tables, resampled to each group's grid, into ``x`` (B, N, C) or packed (T, C).

    Autograd checks before the first write; the embeddings come later, one grid at a time.
    """
    if not plan.groups or not x.shape[-1]:
        return
    if x.device.type not in ("cpu", "cuda"):
        # Autograd derives what the strategy computes there.
        _add_at_once(x, strategy.resample(tables, plan.groups, plan.resampling), plan)
        return
    has_grad = torch.is_grad_enabled()
    trains = has_grad and any(tensor.requires_grad for tensor in tables.tensors)
    watched = kept.watched()
    if trains or watched or (has_grad and x.requires_grad):
        _before_writing(x, tables, plan, trains=trains, watched=watched)

    if watched:
        with torch.no_grad():
            _add_at_once(x, strategy.resample(tables, plan.groups, plan.resampling), plan)
    else:
        write(x, tables, plan, strategy, is_frozen=not trains)


def write(x: Tensor, tables: Tables, plan: Plan, strategy: Strategy, *, is_frozen: bool) -> None:
    """:func:`add_plan` without a word to autograd. Of frozen tables, what comes again is kept."""
    if not x.shape[-1]:
        return
    tokens = Tokens(x, plan.counts)
    with torch.no_grad():
        # On an accelerator nothing is kept: the host would wait for the comparison, and the sums
        # cost no more.
        if is_frozen and x.is_cpu:
            embeddings = _kept_embeddings(tables, plan, strategy)
        else:
            embeddings = strategy.resample(tables, plan.groups, plan.resampling)
        for size, of_grid in embeddings:
            tokens.add(plan.groups[size], of_grid)


def _kept_embeddings(
    tables: Tables, plan: Plan, strategy: Strategy
) -> Iterable[tuple[Size, Tensor]]:
    """The embeddings of each grid: what is kept of the tables, and the rest from the strategy."""
    resampling = plan.resampling
    own_size = tables.own_size(resampling.spec)  # its embeddings are the table: nothing is summed
    cells_summed = sum(h * w for h, w in plan.groups if (h, w) != own_size)
    cells_compared = sum(table.numel() // table.shape[-1] for table in tables.tensors)
    # To compare the tables costs two reads of each of their cells; to sum, about eight reads of
    # each cell of a grid. So a table that is much larger than its grids is never compared.
    if 2 * cells_compared >= 8 * cells_summed:
        return strategy.resample(tables, plan.groups, resampling)

    def make(sources: tuple[Tensor, ...], sizes: Iterable[Size]) -> Iterable[tuple[Size, Tensor]]:
        for size, of_grid in strategy.resample(type(tables)(sources), sizes, resampling):
            yield size, of_grid.to(resampling.token_dtype)

    options = strategy.name, resampling
    return kept.kept_of_sources(tables.tensors, plan.groups, make, options)


def _before_writing(x: Tensor, tables: Tables, plan: Plan, *, trains: bool, watched: bool) -> None:
    """Tell who has to know that ``x`` changes: autograd may forbid it.

    ``trains``: the tables get gradients.
    """
    if watched:
        # ``allow_mutation_on_saved_tensors`` copies ``x`` at the first write, and looks it up as it
        # was saved: this has to come before autograd hears of the change. -0.0 changes no number.
        with torch.no_grad():
            x[:1, :1].add_(-0.0)
    if trains:
        kept.forget(tables.tensors)
        of_tables = partial(gradients, type(tables), tables.shapes, plan)
        AddedInPlace.apply(x, of_tables, *tables.tensors)
    elif x.requires_grad and torch.is_grad_enabled():
        AddedInPlace.apply(x, None)


def _add_at_once(x: Tensor, embeddings: Iterable[tuple[Size, Tensor]], plan: Plan) -> None:
    """One write to ``x`` itself: a selective checkpoint may hand back views of an earlier x."""
    cast = ((size, of_grid.to(x.dtype)) for size, of_grid in embeddings)
    x.add_(assemble(plan, cast).view(x.shape))


def gradients(
    kind: type[Tables], shapes: list[Sequence[int]], plan: Plan, g: Tensor
) -> Sequence[Tensor]:
    """The gradients of tables of a kind, of these shapes, from that of the tokens ``g``.

    They are in float32 at least.
    """
    refuse_in_cuda_graph(g.device, NEEDS_HOST)
    dtype = torch.promote_types(plan.resampling.dtype, g.dtype)
    if not plan.groups or not plan.counts:  # no tokens; a batch of plain images has a group even so
        return [g.new_zeros(shape, dtype=dtype) for shape in shapes]
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        return _gradients_by_autograd(kind, shapes, plan, g)

    with torch.no_grad():
        tokens = Tokens(g.detach(), plan.counts)

        def gradient_of(size: Size) -> Tensor:
            return tokens.sum_over_samples(plan.groups[size], dtype)

        return kind.gradients(
            plan.groups, gradient_of, shapes, plan.resampling.spec, dtype, g.device
        )


def _gradients_by_autograd(
    kind: type[Tables], shapes: list[Sequence[int]], plan: Plan, g: Tensor
) -> Sequence[Tensor]:
    """The same by the definition, float64, which PyTorch can derive again."""
    with torch.enable_grad():
        zeros = []
        for shape in shapes:
            zeros.append(torch.zeros(*shape, dtype=torch.float64, device=g.device))
            zeros[-1].requires_grad_()
        embeddings = kind(tuple(zeros)).dense_products(
            plan.groups, plan.resampling.spec, torch.float64
        )
        tokens = assemble(plan, embeddings).view(g.shape)
    return torch.autograd.grad(tokens, zeros, g.double(), create_graph=torch.is_grad_enabled())
