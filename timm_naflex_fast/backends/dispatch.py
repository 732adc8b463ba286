"""Which form of ``matmul`` and ``grid_sample`` runs: told from who is tracing, and from where the tensors are.

| who calls | what runs |
| --- | --- |
| ``torch.export``, ``torch.jit.trace`` | plain tensor operations (``exported``), which run without this package |
| ``torch.compile`` | one ``torch.library`` operator (``compiled``), inside which one of the forms below runs |
| eager code on CUDA | Triton's kernels, where they can: nothing is read on the host |
| other eager code | ``exact``, which reads the grids on the host |

Factorized tables take the plain operations in every graph and on CUDA. ``interpolate_cached`` reads the grids on the
host everywhere, and a graph breaks there; under ``torch.export`` and ``torch.jit.trace`` it takes the plain operations.
No other file chooses a form by the tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..resampling import cache, dense_resize, grids, interpolate, sparse_resize
from ..resampling.grids import Group
from ..resampling.matrices import ResizeSpec
from ..resampling.tokens import AddedInPlace, Tokens, check_writable, unusual
from . import portable, triton

Where = Tensor | tuple[int, int]
"""Coordinates (B, N, 2) of a NaFlex batch, or the grid (h, w) of every sample of a plain one."""
Cells = Iterable[tuple[Group, Tensor]]


def add(x: Tensor, tables: tuple[Tensor, ...], where: Where, how: ResizeSpec, strategy: str = "matmul") -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    One table ([1,] H0, W0, C), or the two of a factorized embedding, ([1,] H0, C) and ([1,] W0, C): they are resized by
    1-D ``linear``, their sum is added, and of ``how`` only ``ar_preserving`` and ``sampler`` count.

    Raises:
        ValueError: shapes that do not fit, or coordinates that name no cell.
        RuntimeError: ``x`` may not be changed in place.
    """
    grids.check_tokens(x, tables[0].shape[-1])
    if isinstance(where, Tensor):
        grids.check_coord(where, x)
    if len(tables) == 2:
        # timm's flag takes affine positions for factorized tables in every release.
        sampler = "interpolate" if how.sampler == "interpolate" else "affine_grid"
        how = ResizeSpec("linear", antialias=False, ar_preserving=how.ar_preserving, sampler=sampler)
    form = _form_on_device(x, tables, how, strategy) if isinstance(where, Tensor) else None
    if form is not None:
        return form(x, *tables, where, how)
    if torch.compiler.is_compiling():
        return _outside_graphs(x, tables, where, how, strategy)
    add_groups(x, tables, *_read_groups(x, where, how, strategy), strategy)


# The grids are read on the host, which cannot be captured: a graph breaks here, as it does at timm's own loops.
_outside_graphs = torch.compiler.disable(add)


def _form_on_device(
    x: Tensor, tables: tuple[Tensor, ...], how: ResizeSpec, strategy: str
) -> Callable[..., None] | None:
    """The form that takes coordinates and reads nothing on the host; None: the grids are to be read there."""
    learned = len(tables) == 1
    if traced_plainly():
        return portable.add_learned if learned else portable.add_factorized
    if strategy == "interpolate_cached":
        return None
    if torch.compiler.is_compiling():
        if not learned:
            return portable.add_factorized
        from . import operator  # registering operators takes longer than importing all the rest

        return operator.add_learned
    if learned:
        return triton.add_learned if triton.serves(x, tables[0], how) else None
    return portable.add_factorized if x.is_cuda and how.sampler == "interpolate" else None


def traced_plainly() -> bool:
    """Whether a tracer wants PyTorch's own operations: ``torch.export``, ``torch.jit.trace``.

    Where PyTorch is too old to name the tracer, every compiler counts as ``torch.export``.
    """
    if torch.jit.is_tracing():
        return True
    if hasattr(torch.compiler, "is_exporting"):
        # The flag behind it: Dynamo of torch 2.11 takes the call itself for true under torch.compile as well.
        return getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_compiling()


def add_sizes(
    x: Tensor, table: Tensor, sizes: list[tuple[int, int, int]], how: ResizeSpec, strategy: str = "matmul"
) -> None:
    """As :func:`add`, from sizes (1, h, w) on the host in place of coordinates; nothing is read back."""
    grids.check_tokens(x, table.shape[-1])
    groups, counts = grids.group_sizes(sizes, pads=how.sampler != "interpolate", length=x.shape[1])
    if _form_on_device(x, (table,), how, strategy) is not None or torch.compiler.is_compiling():
        return add(x, (table,), coordinates(_on_device(sizes, x), x.shape[1]), how, strategy)
    add_groups(x, (table,), groups, counts, how, strategy)


def resample_sizes(
    table: Tensor,
    sizes: Tensor | Sequence[Sequence[int]],
    how: ResizeSpec,
    strategy: str,
    *,
    merge: int = 1,
    length: int | None = None,
    pads: bool = False,
) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to sizes (h, w) or (t, h, w): packed (T, C), or (B, N, C) for a ``length``.

    ``pads``: tokens behind an image get its first cell, else zeros.
    """
    form = _form_on_device(table, (table,), how, strategy)
    in_graph = torch.compiler.is_compiling() or traced_plainly()
    if in_graph and form is None:
        return _sizes_outside_graphs(table, sizes, how, strategy, merge=merge, length=length, pads=pads)
    if in_graph and isinstance(sizes, Tensor):
        if length is None:
            raise ValueError("in a graph, packed embeddings need sizes on the host: give a sequence, or a length")
        fits = (sizes > 0).all() & (sizes[:, -2:] % merge == 0).all() & (sizes.prod(1) <= length).all()
        # No number in the message: to write ``length`` into it would fix it, one graph for each length.
        torch._assert_async(fits, "grid_sizes must be at least 1, multiples of merge, and of at most ``length`` tokens")
        return _resample_on_device(table, sizes.to(table.device), how, merge, length, pads)
    sizes = grids.sizes_on_host(sizes)
    groups, counts = grids.group_sizes(sizes, merge=merge, pads=pads, length=length)
    tokens = [t * h * w for t, h, w in sizes]
    longest = max(tokens, default=0) if length is None else length
    # Not where most of a padded batch were padding: a video packed together with small images.
    if form is not None and (in_graph or len(sizes) * longest <= 2 * sum(map(sum, counts))):
        out = _resample_on_device(table, _on_device(sizes, table), how, merge, longest, pads)
        return out if length is not None else torch.cat([image[:n] for image, n in zip(out, tokens)])
    out = torch.zeros(sum(map(sum, counts)), table.shape[-1], dtype=table.dtype, device=table.device)
    add_groups(out, (table,), groups, counts, how, strategy, torch.promote_types(table.dtype, torch.float32))
    return out if length is None else out.view(len(sizes), length, table.shape[-1])


_sizes_outside_graphs = torch.compiler.disable(resample_sizes)


def _on_device(sizes: list[tuple[int, int, int]], like: Tensor) -> Tensor:
    """Sizes (B, 3), or (B, 2) if there are no frames, on the device of ``like``, for which the host does not wait."""
    columns = slice(0 if any(t > 1 for t, _, _ in sizes) else 1, 3)
    listed = torch.tensor([size[columns] for size in sizes], dtype=torch.int64, device="cpu")
    return listed.to(like.device, non_blocking=True)


def coordinates(sizes: Tensor, length: int, merge: int = 1) -> Tensor:
    """Coordinates (B, length, 2) from sizes (B, 2) or (B, 3); tokens behind the first frame carry (0, 0)."""
    h, w = sizes[:, -2:, None].unbind(1)
    cell = torch.arange(length, device=sizes.device)[None]
    block, inner = cell // (merge * merge), cell % (merge * merge)
    y = block // (w // merge) * merge + inner // merge
    x = block % (w // merge) * merge + inner % merge
    return torch.stack((y, x), -1) * (cell < h * w)[..., None]


def _resample_on_device(table: Tensor, sizes: Tensor, how: ResizeSpec, merge: int, length: int, pads: bool) -> Tensor:
    """The embeddings (B, N, C), with coordinates in place of groups; no size (B, 2) or (B, 3) is read back."""
    out = torch.zeros(sizes.shape[0], length, table.shape[-1], dtype=table.dtype, device=table.device)
    add(out, (table,), coordinates(sizes, length, merge), how)
    token = torch.arange(length, device=table.device)
    if sizes.shape[1] == 3:  # frames repeat the first
        cell = token % sizes[:, 1:].prod(1, keepdim=True)
        out = out.gather(1, cell[..., None].expand(-1, -1, out.shape[-1]))
    rest = out[:, :1] if pads else torch.zeros_like(out[:, :1])
    return torch.where((token < sizes.prod(1, keepdim=True))[..., None], out, rest)


def gradient_eagerly(g: Tensor, table_shape: torch.Size, where: Where, how: ResizeSpec) -> Tensor:
    """The gradient (H0, W0, C) of a learned table from that of the tokens (B, N, C)."""
    groups, counts, how = _read_groups(g, where, how)
    if not groups:
        return g.new_zeros(table_shape)
    (grad,) = _gradients([table_shape], groups, counts, how, torch.float32, g)
    return grad


def _read_groups(
    x: Tensor, where: Where, how: ResizeSpec, strategy: str = "matmul"
) -> tuple[list[Group], list[tuple[int, int]], ResizeSpec]:
    """The groups of the batch, its counts of tokens, and ``how`` with the batch's largest grid where that counts."""
    if not isinstance(where, Tensor):
        groups = grids.whole_batch(x, where)
        return groups, grids.token_counts(groups, x), how
    squares = strategy == "interpolate_cached" and how.ar_preserving  # which resizes to (L, L), all of it
    groups = grids.group_grids(where, x, pads=how.sampler != "interpolate", squares=squares)
    if how.sampler == "affine_grid" and groups:
        h, w = (grids.whole_numbers(where).amax((0, 1)) + 1).tolist()
        how = replace(how, within=how.lengths(h, w))
    return groups, grids.token_counts(groups, x), how


def add_groups(
    x: Tensor,
    tables: tuple[Tensor, ...],
    groups: list[Group],
    counts: list[tuple[int, int]],
    how: ResizeSpec,
    strategy: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add the resampled tables into ``x``, a batch (B, N, C) or packed (T, C), and tell autograd how to go back.

    The groups name samples, of which ``counts`` gives the tokens in the grid and behind; ``dtype`` is that of the sums.
    """
    check_writable(x)
    if not groups:
        return
    _keep_heap()
    sources, ndim = tables, 3 if len(tables) == 1 else 2
    tables = tuple(table if table.ndim == ndim else table.squeeze(0) for table in tables)
    make, how_made = _RESAMPLE[strategy, len(tables)], (how, x.dtype, dtype)
    training = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
    leaves: Sequence[Tensor] = tables if training else ()
    if training:
        cache.forget(*sources)
        resampled = make(tables, groups, *how_made)
        if strategy == "interpolate_cached":  # PyTorch itself goes on from the gradients of the cells to the tables
            resampled = list(resampled)
            leaves = [cells for _, cells in resampled]
    elif _comparing_pays(tables, groups, strategy) and cache.unchanged(sources):

        def finished(size: tuple[int, int]) -> Tensor:
            ((_, cells),) = make(tables, [Group(*size, [], size[0] * size[1])], *how_made)
            return cells.to(x.dtype)

        sizes = [(group.h, group.w) for group in groups]
        resampled = zip(groups, cache.finished(sources, sizes, (strategy, how, dtype, x.dtype), finished))
    else:
        resampled = make(tables, groups, *how_made)
    tokens = Tokens.of(x.detach(), counts)  # written to unseen by autograd, which hears of it at the end
    with torch.no_grad():
        for group, cells in resampled:
            tokens.add(group, cells.to(x.dtype))
    if training or (torch.is_grad_enabled() and x.requires_grad):
        shapes = [leaf.shape for leaf in leaves]
        of_cells = strategy == "interpolate_cached"
        AddedInPlace.apply(x, partial(_gradients, shapes, groups, counts, None if of_cells else how, dtype), *leaves)


# ``exact`` knows no cache: its plans are kept from outside.
resize_plan = cache.kept("resize plans")(sparse_resize.resize_plan)
line_sum = cache.kept("line sums")(sparse_resize.line_sum)

# The strategies, each for one learned table and for the two of a factorized embedding:
# (tables, groups, how, dtype of the tokens, dtype of the sums) -> the cells of each group.
_RESAMPLE: dict[tuple[str, int], Callable[..., Cells]] = {
    ("matmul", 1): lambda tables, groups, how, _, dtype: sparse_resize.resample(
        tables[0], groups, how, dtype, resize_plan
    ),
    ("matmul", 2): partial(sparse_resize.resample_lines, plan=line_sum),
    ("interpolate_cached", 1): interpolate.resample,
    ("interpolate_cached", 2): interpolate.resample,
}
# The same sums with other matrices, those of ``how.sampler``.
_RESAMPLE |= {("grid_sample", tables): _RESAMPLE["matmul", tables] for tables in (1, 2)}


def _comparing_pays(tables: tuple[Tensor, ...], groups: list[Group], strategy: str) -> bool:
    """Whether it costs less to compare the table with what finished tables were made from than to resample it again."""
    if strategy == "interpolate_cached" or len(tables) == 2:
        return True
    # To compare costs two reads of each cell of the table; to sum for a grid, about eight reads of each of its cells.
    return tables[0].shape[0] * tables[0].shape[1] <= 4 * sum(group.h * group.w for group in groups)


def _gradients(
    shapes: list[torch.Size],
    groups: list[Group],
    counts: list[tuple[int, int]],
    how: ResizeSpec | None,
    dtype: torch.dtype,
    g: Tensor,
) -> Sequence[Tensor]:
    """The gradients of the tables from that of the tokens; without ``how``, those of the groups' cells."""
    if not counts:  # an empty batch
        return [g.new_zeros(shape) for shape in shapes]
    if unusual(g) or (torch.is_grad_enabled() and g.requires_grad):
        make = partial(zip, groups) if how is None else partial(dense_resize.resample, groups=groups, how=how)
        return dense_resize.gradients_by_autograd(g, shapes, make, counts)
    with torch.no_grad():
        tokens = Tokens.of(g.detach(), counts)
        if how is None:
            return [tokens.sum(group, torch.promote_types(dtype, g.dtype)) for group in groups]
        if len(shapes) == 1:
            return [sparse_resize.table_gradient(tokens, shapes[0], groups, how, dtype, resize_plan)]
        return sparse_resize.line_gradients(tokens, [n0 for n0, _ in shapes], groups, how, dtype, line_sum)


@lru_cache(maxsize=1)
def _keep_heap() -> None:
    """Make glibc reuse temporaries of a few MB: to free one block of 31 MiB raises its thresholds to that size.

    By default glibc returns them to the kernel at once, and the next call faults them in again page by page, which took
    longer than the sums (27 ms instead of 11, 64 samples of a 32 x 32 table). No memory is touched here.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
