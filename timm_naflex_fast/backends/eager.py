"""The backend that reads the grids on the host: any strategy, on a CPU or CUDA.

For each grid of the plan it lets the strategy resample the table, adds the embeddings to the
tokens, and tells autograd how to go back. ``AddedInPlace`` is one node for the whole batch: the
gradient of the tokens passes through untouched, and is read once for the table.

``tests/contract/test_backends.py`` compares it with timm, and ``test_frozen_tables.py`` there what
is kept.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..batch.layout import Sizes
from ..batch.plan import Plan
from ..batch.tokens import AddedInPlace, add_to_tokens, sum_over_tokens
from ..resampling import dense, kept, sparse
from ..resampling.dense import Embeddings
from ..resampling.spec import ResizeSpec, Size
from ..resampling.tables import PositionTable, size_of, whole
from ..strategies import Strategy
from ..tracing import why_unsupported


def resample(table: PositionTable, sizes: Sizes, spec: ResizeSpec, strategy: Strategy) -> Tensor:
    """The table resampled to ``sizes``; see ``dispatch.resample``."""
    (learned,) = table
    tokens, plan = sizes.plan(learned.device, spec)
    out = learned.new_zeros(1, tokens, learned.shape[-1])
    add_plan(out, table, plan, strategy)
    if sizes.length is None:
        return out[0]
    return out.view(len(sizes.values), sizes.length, learned.shape[-1])


def add_plan(x: Tensor, table: PositionTable, plan: Plan, strategy: Strategy) -> None:
    """Add the table, resampled to each grid of the plan, into ``x`` (B, N, C).

    Autograd checks before the first write; the embeddings come later, one grid at a time.
    """
    if not plan.runs:
        return
    has_grad = torch.is_grad_enabled()
    trains = has_grad and any(part.requires_grad for part in table)
    if trains or (has_grad and x.requires_grad):
        cells = whole(table)
        AddedInPlace.apply(x, partial(gradient, cells.shape, plan), cells)
    write(x, table, plan, strategy, is_frozen=not trains)


def write(
    x: Tensor, table: PositionTable, plan: Plan, strategy: Strategy, *, is_frozen: bool
) -> None:
    """:func:`add_plan` without a word to autograd. Of a frozen table, what comes again is kept."""
    with torch.no_grad():
        # On an accelerator nothing is kept: the host would wait for the comparison, and the sums
        # cost no more.
        frozen = None
        if is_frozen and x.is_cpu and _is_worth_comparing(table, plan):
            frozen = kept.frozen(table)
        if frozen is None:
            embeddings = strategy.resample(table, plan.runs, plan.spec, x.dtype)
        else:
            embeddings = _kept_embeddings(frozen, plan, strategy, x.dtype)
        for size, of_grid in embeddings:
            add_to_tokens(x, plan.runs[size], of_grid)


def _is_worth_comparing(table: PositionTable, plan: Plan) -> bool:
    """Whether to compare the table with what was kept of it costs less than to resample it.

    To compare costs two reads of each of its cells; to sum, about eight reads of each cell of a
    grid. So a table that is much larger than its grids is never compared.
    """
    own_size = plan.spec.own_size(size_of(table))  # its embeddings are the table itself
    summed = 0
    for h, w in plan.runs:
        if (h, w) != own_size:
            summed += h * w
    compared = sum(part.shape[:-1].numel() for part in table)
    return 2 * compared < 8 * summed


def _kept_embeddings(
    table: kept.Frozen, plan: Plan, strategy: Strategy, dtype: torch.dtype
) -> Embeddings:
    """The embeddings of each grid in ``dtype``: what is kept of the table, and the rest."""
    options = (table, strategy, plan.spec, dtype)
    found = {size: kept.use((*options, size)) for size in plan.runs}
    missing = [size for size, of_grid in found.items() if of_grid is None]
    if missing:
        with kept.unseen():
            for size, of_grid in strategy.resample(table.tensors, missing, plan.spec, dtype):
                found[size] = of_grid.to(dtype)
                kept.keep((*options, size), found[size])
    return found.items()


def gradient(shape: Sequence[int], plan: Plan, g: Tensor) -> Tensor:
    """The gradient of a table of this shape (H0, W0, C) from that of the tokens ``g``.

    It is in float32 at least.
    """
    dtype = torch.promote_types(torch.float32, g.dtype)
    if not plan.runs:  # no tokens
        return g.new_zeros(shape, dtype=dtype)
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        return _gradient_by_autograd(shape, plan, g)

    with torch.no_grad():

        def gradient_of(size: Size) -> Tensor:
            return sum_over_tokens(g, plan.runs[size], size, dtype)

        spec = plan.spec
        return sparse.gradient(plan.runs, gradient_of, shape, spec, dtype, g.device)


def _gradient_by_autograd(shape: Sequence[int], plan: Plan, g: Tensor) -> Tensor:
    """The same by the definition, float64, which PyTorch can derive again."""
    with torch.enable_grad():
        table = torch.zeros(*shape, dtype=torch.float64, device=g.device, requires_grad=True)
        sizes, embeddings = zip(*dense.definition(table, plan.runs, plan.spec))
    # Sums of parts of g, in new memory: PyTorch derives these, too.
    summed = [sum_over_tokens(g, plan.runs[size], size, torch.float64) for size in sizes]
    (of_table,) = torch.autograd.grad(
        embeddings, table, summed, create_graph=torch.is_grad_enabled()
    )
    return of_table
