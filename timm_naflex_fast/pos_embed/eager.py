"""Position embeddings in eager code, which reads the grids on the host: any strategy, on a CPU or CUDA.

For each grid of a batch the strategy resamples the table, and the embeddings are added to the tokens
that take its cells. To autograd the whole batch is one node: the gradient of the tokens passes
through untouched, and is read once for the table.

The way of a call, where the table is frozen and its grids came before::

    timm's method -> calls.Replacement           asks whether ours runs, and counts after it
                  -> timm_methods.add_to_batch   reads the module, asks ``tracing`` who watches
                  -> eager.add                   checks ``x``
                  -> tokens.runs_of              reads the grids
                  -> eager.add_runs              nobody trains: no word to autograd
                  -> kept.frozen                 a size came before, and the table has the same bits
                  -> tokens.add_to_tokens        adds it to the samples of each grid

Where the table trains, ``add_runs`` tells autograd, and the strategy computes what is added. Backward:
``AddedInPlace -> gradient -> sums.gradient -> tokens.sum_over_tokens``. ``tracing`` sends a call that is
traced to ``graphs`` instead.

``tests/contract/test_backends.py`` compares it with timm, and ``test_frozen_tables.py`` there what
is kept.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..tracing import why_unsupported
from . import kept, sums
from .sizes import Sizes
from .strategies import STRATEGIES
from .sums import Embeddings
from .table import PositionTable, ResizeSpec, Size, whole
from .tokens import Coordinates, Runs, add_to_tokens, check_tokens, runs_of, sum_over_tokens
from .weights import sampled


def add(
    x: Tensor,
    table: PositionTable,
    patch_coord: Coordinates,
    spec: ResizeSpec,
    strategy: str,
    *,
    may_keep: bool = True,
) -> None:
    """Add the table, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Args:
        x: tokens, floating point; modified.
        table: one learned table, or the two of a factorized embedding.
        patch_coord: where the tokens lie.
        spec: how the table is resized.
        strategy: what computes, a name in ``STRATEGIES``.
        may_keep: of a table that does not train, what comes again is kept.

    Raises:
        ValueError: shapes that do not fit; coordinates that name no cell.
        RuntimeError: ``x`` may not be changed in place.
    """
    check_tokens(x, table[0].shape[-1], patch_coord)
    # As PyTorch's own ``add_``, which cannot see it in the views that we write into.
    if torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError(
            "x cannot be added to in place: several of its elements are one and the same memory "
            "location (as after expand()); clone() it before"
        )
    runs = runs_of(patch_coord, x, spec)
    if runs is None:  # not every coordinate names a cell
        x.add_(sampled(whole(table), patch_coord, spec).to(x.dtype))
        return
    add_runs(x, table, runs, spec, strategy, may_keep=may_keep)


def resample(table: PositionTable, sizes: Sizes, spec: ResizeSpec, strategy: str) -> Tensor:
    """The table resampled to ``sizes``: packed (T, C) or, if they have a ``length``, padded (B, N, C).

    Tokens after an image get zeros, or its first cell.
    """
    (learned,) = table
    tokens, runs = sizes.runs(learned.device)
    out = learned.new_zeros(1, tokens, learned.shape[-1])
    add_runs(out, table, runs, spec, strategy)
    if sizes.length is None:
        return out[0]
    return out.view(len(sizes.values), sizes.length, learned.shape[-1])


def add_runs(
    x: Tensor,
    table: PositionTable,
    runs: Runs,
    spec: ResizeSpec,
    strategy: str,
    *,
    may_keep: bool = True,
) -> None:
    """Add the table, resampled to each grid of the runs, into ``x`` (B, N, C); see :func:`add`.

    Autograd checks before the first write; the embeddings come later, one grid at a time.
    """
    if not runs:
        return
    if not torch.is_grad_enabled():
        _write(x, table, runs, spec, strategy, may_keep)
        return
    trains = table[0].requires_grad or table[-1].requires_grad
    if trains or x.requires_grad:
        cells = whole(table)
        AddedInPlace.apply(x, partial(gradient, cells.shape, runs, spec), cells)
    with torch.no_grad():
        _write(x, table, runs, spec, strategy, may_keep and not trains)


def _write(
    x: Tensor,
    table: PositionTable,
    runs: Runs,
    spec: ResizeSpec,
    strategy: str,
    may_keep: bool,
) -> None:
    """:func:`add_runs` without a word to autograd."""
    sizes = list(runs)
    learned = table[0]
    table_size = learned.shape[-3:-1]
    if len(table) == 1 and table_size in runs and spec.own_size(table_size):
        # It is not resized.
        add_to_tokens(x, runs[table_size], learned.flatten(0, -2))
        sizes.remove(table_size)
        if not sizes:
            return
    # On an accelerator nothing is kept: the host would wait for the comparison, and the sums cost
    # no more.
    may_keep = may_keep and x.is_cpu
    for size, of_grid in _embeddings(table, sizes, spec, strategy, x.dtype, may_keep):
        add_to_tokens(x, runs[size], of_grid)


def _embeddings(
    table: PositionTable,
    sizes: list[Size],
    spec: ResizeSpec,
    strategy: str,
    dtype: torch.dtype,
    may_keep: bool,
) -> Embeddings:
    """The embeddings of each size: what is kept of the table, in ``dtype``, and the rest.

    To compare the table with what was kept of it costs two reads of each of its cells; to sum, about
    eight reads of each cell of a grid. So a table that is much larger than its grids is never
    compared.
    """
    compared = 0
    for part in table:
        compared += part.numel() // part.shape[-1]
    summed = 0
    for h, w in sizes:
        summed += h * w
    frozen = None
    if may_keep and 2 * compared < 8 * summed:
        frozen = kept.frozen(table, sizes)
    if frozen is None:
        yield from STRATEGIES[strategy](table, sizes, spec, dtype)
        return

    options = (frozen, strategy, spec, dtype)
    missing = []
    for size in sizes:
        of_grid = kept.use((*options, size))
        if of_grid is None:
            missing.append(size)
        else:
            yield size, of_grid
    if missing:
        with kept.unseen():
            resampled = STRATEGIES[strategy](frozen.tensors, missing, spec, dtype)
            new = [(size, of_grid.to(dtype)) for size, of_grid in resampled]
        for size, of_grid in new:
            kept.keep((*options, size), of_grid)
            yield size, of_grid


class AddedInPlace(torch.autograd.Function):
    """Tells autograd that something linear in a table is added into ``x``, in place.

    ``forward`` only marks ``x`` as changed: who calls it writes into ``x`` after that. The gradient
    of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[Tensor], Tensor], table: Tensor) -> Tensor:
        """``gradient(g)`` gives the gradient of ``table`` in any dtype; autograd casts it."""
        ctx.gradient = gradient
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x``, and that of the table."""
        (g,) = grads
        of_table = None
        if ctx.needs_input_grad[2]:
            of_table = ctx.gradient(g)
        return g, None, of_table


def gradient(shape: Sequence[int], runs: Runs, spec: ResizeSpec, g: Tensor) -> Tensor:
    """The gradient of a table of this shape (H0, W0, C) from that of the tokens ``g``.

    It is in float32 at least.
    """
    dtype = torch.promote_types(torch.float32, g.dtype)
    if not runs:  # no tokens
        return g.new_zeros(shape, dtype=dtype)
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        return _gradient_by_autograd(shape, runs, spec, g)

    with torch.no_grad():

        def gradient_of(size: Size) -> Tensor:
            return sum_over_tokens(g, runs[size], size, dtype)

        return sums.gradient(runs, gradient_of, shape, spec, dtype, g.device)


def _gradient_by_autograd(shape: Sequence[int], runs: Runs, spec: ResizeSpec, g: Tensor) -> Tensor:
    """The same by the definition, float64, which PyTorch can derive again."""
    with torch.enable_grad():
        table = torch.zeros(*shape, dtype=torch.float64, device=g.device, requires_grad=True)
        sizes, embeddings = zip(*sums.definition(table, runs, spec))
    # Sums of parts of g, in new memory: PyTorch derives these, too.
    summed = [sum_over_tokens(g, runs[size], size, torch.float64) for size in sizes]
    (of_table,) = torch.autograd.grad(
        embeddings, table, summed, create_graph=torch.is_grad_enabled()
    )
    return of_table
