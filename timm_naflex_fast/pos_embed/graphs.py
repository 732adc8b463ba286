"""Position embeddings in graphs, where nothing may be read on the host.

- ``"operator"``: ``torch.compile``, or a mode that watches operators, on a CPU or CUDA. A compiled graph
  cannot look at the values of coordinates, and plain operations, which need none, are many times
  slower. So the graph holds one ``torch.library`` operator, inside which ``eager`` runs. It reads the
  grids on the host, so CUDA graphs leave it out. A mode that watches operators sees one call,
  whatever is kept inside.
- ``"plain"``: ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs; any other
  device. Each token has a row of H0*W0 weights, computed from its coordinate in closed form, and one
  product takes all tokens to their embeddings, or few cells of a large table are gathered
  (``formula.embeddings_at``). So an exported program runs without this package. Every strategy has its
  result in the same way.

``tracing.backend_for`` tells them apart, and from eager code. ``patching`` decides before: in an eager
model under ``torch.func`` timm's own code runs.

``tests/contract/test_backends.py`` tests every way.
"""

import re
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..tracing import Backend, refuse_in_cuda_graph, watcher, why_unsupported
from . import eager
from .formula import TokenPositions, embeddings_at
from .sizes import Sizes, coordinates_in_graph, row_major
from .table import PositionTable, ResizeSpec, whole
from .tokens import (
    MAX_COORDINATE,
    Coordinates,
    check_tokens,
    grid_sizes_from_coord,
    most_cells,
    runs_of,
    token_counts,
    tokens_of_images,
    whole_numbers,
)
from .weights import sampled_gradient

FROM_HOST = (
    "sizes are copied from the host, which no CUDA graph can record; "
    "give coordinates on the device of x"
)

# How the table is resampled: the strategy's name, and the fields of ``ResizeSpec``.
OPTIONS = (
    "str strategy, str interpolation, bool antialias, bool align_corners, bool ar_preserving, "
    "bool samples, bool embeds_padding"
)

# The compiler keeps graphs on disk, with the backward pass in them, and finds them by the names of
# their operators: after an update, that of the release before would go on.
_RELEASE = re.sub(r"\W", "_", __version__)

_options: dict[str, Any] = dict(mutates_args=())
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _options["tags"] = (torch.Tag.cudagraph_unsafe,)


def add(
    x: Tensor,
    table: PositionTable,
    patch_coord: Coordinates,
    spec: ResizeSpec,
    strategy: str,
    backend: Backend,
) -> None:
    """``eager.add``, or the same in the graph that ``backend`` names.

    Raises:
        RuntimeError: in a CUDA graph, what lies on the host.
    """
    if backend == "eager":
        eager.add(x, table, patch_coord, spec, strategy)
        return
    # A compiler may know nothing of a size until the graph runs: there the operator checks.
    check_tokens(x, table[0].shape[-1], None if backend == "operator" else patch_coord)
    coord = coordinates_in_graph(patch_coord, x)  # (B, N, 2) or (1, N, 2)
    if coord.device != x.device:
        refuse_in_cuda_graph(x.device, FROM_HOST)
    if backend == "plain":
        add_plain(x, whole(table), coord, spec)
        return
    if not isinstance(patch_coord, Tensor):
        coord = coord.expand(len(x), -1, -1)
    cells = whole(table)
    if len(table) == 2:  # as one table they are no longer what timm's own calls resize
        strategy = "matmul"
    trains = cells.requires_grad and torch.is_grad_enabled()
    total, _ = add_learned(x, cells, coord, trains, strategy, *spec)
    x.copy_(total)  # the compiler removes this copy


def resample(
    table: PositionTable, sizes: Sizes, spec: ResizeSpec, strategy: str, backend: Backend
) -> Tensor:
    """``eager.resample``, or the same in the graph that ``backend`` names."""
    if backend == "eager":
        return eager.resample(table, sizes, spec, strategy)
    (learned,) = table
    refuse_in_cuda_graph(learned.device, FROM_HOST)
    length = sizes.length
    if length is None:
        # Pad all images to the longest, and take the tokens that each has.
        if isinstance(sizes.values, Tensor) and watcher() == "tracer":
            raise ValueError(
                "in a graph, packed embeddings need sizes on the host: give a sequence, or a length"
            )
        counts = [t * h * w for t, h, w in sizes.on_host()]
        length = max(counts, default=0)

    on_device = sizes.as_tensor(length).to(learned.device, non_blocking=True)
    patch_coord = row_major(on_device, length, sizes.merge)
    padded = learned.new_zeros(*patch_coord.shape[:2], learned.shape[-1])
    # The tokens of later frames lie after those of the grid: the spec embeds padding.
    add(padded, table, patch_coord, spec, strategy, backend)
    if sizes.length is not None:
        if sizes.padding == "first":
            return padded
        is_own = tokens_of_images(on_device, length)
        return padded.masked_fill(~is_own[..., None], 0)
    images = [image[:count] for image, count in zip(padded, counts)]
    no_image = padded[:0].flatten(0, 1)  # (0, C): so that there is something to concatenate
    return torch.cat([no_image, *images])


@torch.library.custom_op(
    f"timm_naflex_fast::add_learned_{_RELEASE}",
    schema=f"(Tensor x, Tensor table, Tensor coord, bool trains, {OPTIONS}) -> (Tensor, Tensor)",
    **_options,
)
def add_learned(
    x: Tensor, table: Tensor, patch_coord: Tensor, trains: bool, strategy: str, *spec: Any
) -> tuple[Tensor, Tensor]:
    """``x`` plus the table, and a copy of the coordinates for the backward pass."""
    out = x.clone(memory_format=torch.contiguous_format)
    frozen = (table.detach(),)
    eager.add(out, frozen, patch_coord, ResizeSpec(*spec), strategy, may_keep=not trains)
    return out, patch_coord.clone()


def gradient(
    g: Tensor, patch_coord: Tensor, rows: int, cols: int, strategy: str, *spec: Any
) -> Tensor:
    """The table's gradient (rows, cols, C), float32 at least; the same for every strategy."""
    shape = (rows, cols, g.shape[-1])
    how = ResizeSpec(*spec)
    runs = runs_of(patch_coord, g, how)
    if runs is None:
        return sampled_gradient(shape, patch_coord, how, g)
    return eager.gradient(shape, runs, how, g)


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


def add_plain(x: Tensor, table: Tensor, patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the table (H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    See ``eager.add``. The coordinates are (B, N, 2), or (1, N, 2) for all samples. Tokens may
    come in any order, and any may be missing. Those with a negative or non-finite coordinate get
    NaN, and those of a grid with far more cells than there are tokens. Where the reference samples,
    every token is sampled at its coordinate, also at a negative one and between cells; only
    non-finite ones get NaN.
    """
    positions, embedded = token_positions(patch_coord.to(x.device), spec)
    embeddings = embeddings_at(table, positions, spec).to(x.dtype)
    # -0.0, which added changes no token.
    x.add_(embeddings.masked_fill(~embedded[..., None], -0.0))


def token_positions(patch_coord: Tensor, spec: ResizeSpec) -> tuple[TokenPositions, Tensor]:
    """The positions, and which tokens (B, N) get an embedding, or NaN.

    Grids as timm reads them: the largest coordinate + 1. A sample's first h*w tokens belong to it.
    """
    if spec.samples:  # at any coordinate, of padding too
        coord = patch_coord.detach().to(torch.float32)  # (B, N, 2)
        embedded = torch.ones_like(coord[..., 0], dtype=torch.bool)  # (B, N)
        return TokenPositions.of(grid_sizes_from_coord(coord), coord), embedded

    coord = whole_numbers(patch_coord).clamp(-1, MAX_COORDINATE)
    size = grid_sizes_from_coord(coord)  # (B, 2)
    length = coord.shape[1]
    embedded = tokens_of_images(size, length)  # (B, N)
    if spec.embeds_padding:
        embedded = torch.ones_like(embedded)
    cells = token_counts(size)
    # By name: coremltools 9 does not know ``|``.
    no_grid = torch.logical_or(cells < 1, cells > most_cells(length))  # (B, 1)
    wrong = torch.logical_or(embedded & (coord < 0).any(-1), no_grid)  # (B, N)

    # Padding takes the place (0, 0): its own coordinate may be anything.
    coord = coord.masked_fill(~embedded[..., None], 0).to(torch.float32)
    coord = coord.masked_fill(wrong[..., None], torch.nan)
    size = size.clamp(min=1).to(torch.float32)
    return TokenPositions.of(size, coord), torch.logical_or(embedded, wrong)
