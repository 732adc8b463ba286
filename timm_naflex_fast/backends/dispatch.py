"""Which backend resamples the position tables: told from who is tracing.

| who calls | which backend |
| --- | --- |
| eager code, on a CPU or CUDA | ``eager``, which reads the grids on the host, once for a batch |
| ``torch.compile``, or a mode that watches operators, on a CPU or CUDA | ``operator``: one operator, inside which ``eager`` runs |
| ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs | ``traceable``: plain operations |
| all of these on another device, and eager code there | ``traceable`` |

In a graph of ``traceable`` every strategy computes the result of its ``reference`` in the same way.
``patching`` decides before: in an eager model under ``torch.func`` timm's own code runs.

The way of a call in eager code, where the table is frozen and its grids came before::

    timm's method -> decide.Replacement        asks whether ours runs, and counts after it
                  -> dispatch.add              checks the shapes, picks a backend
                  -> layout.plan_of            reads the grids, and which samples share one
                  -> eager.add_plan            nobody trains and no mode watches: no word to autograd
                  -> kept.frozen               the table has the same bits: what was kept of it
                  -> tokens.add_to_tokens      adds it to the samples of each grid

Where the table trains, ``eager.add_plan`` goes on otherwise::

    eager.add_plan -> tokens.AddedInPlace      tells autograd
                   -> strategy.resample        the embeddings of each grid
                   -> sparse.SparseSum         the arithmetic
                   -> tokens.add_to_tokens     adds them to the samples of each grid
    backward:  tokens.AddedInPlace -> eager.gradient -> sparse.gradient -> tokens.sum_over_tokens

A frozen table whose grids are new goes the second way without autograd.

``tests/contract/test_backends.py`` tests every way.
"""

import torch
from torch import Tensor

from ..batch.grids import tokens_of_images
from ..batch.layout import (
    Sizes,
    TokenLayout,
    check_tokens,
    coordinates_in_graph,
    plan_of,
    row_major,
)
from ..batch.tokens import check_no_shared_elements
from ..resampling.spec import ResizeSpec
from ..resampling.tables import PositionTable, whole
from ..strategies import Strategy
from ..tracing import Context, is_tracing, refuse_in_cuda_graph
from . import eager, operator, traceable

FROM_HOST = (
    "sizes are copied from the host, which no CUDA graph can record; "
    "give coordinates on the device of x"
)


def add(
    x: Tensor,
    table: PositionTable,
    layout: TokenLayout,
    spec: ResizeSpec,
    strategy: Strategy,
    context: Context,
) -> None:
    """Add the table, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Args:
        x: tokens, floating point; modified.
        table: one learned table, or the two of a factorized embedding.
        layout: where the tokens lie.
        spec: how the table is resized.
        strategy: what computes in eager code, and inside the operator.
        context: what ``context_of`` says of the tensors.

    Raises:
        ValueError: shapes that do not fit; in eager code coordinates that name no cell, an
            ``InvalidCoordinateError``.
        RuntimeError: ``x`` may not be changed in place; in a CUDA graph, what lies on the host.
    """
    # A compiler may know nothing of a size until the graph runs: there the operator checks.
    check_tokens(x, table[0].shape[-1], None if context == "operator" else layout)
    if context is None:
        check_no_shared_elements(x)
        plan = plan_of(layout, x, spec)
        eager.add_plan(x, table, plan, strategy)
        return
    # In a graph nothing may be read on the host.
    patch_coord = coordinates_in_graph(layout, x)  # (B, N, 2) or (1, N, 2)
    if patch_coord.device != x.device:
        refuse_in_cuda_graph(x.device, FROM_HOST)
    if context == "operator":
        if not isinstance(layout, Tensor):
            patch_coord = patch_coord.expand(len(x), -1, -1)
        operator.add(x, table, patch_coord, spec, strategy.name)
    else:
        traceable.add(x, whole(table), patch_coord, spec)


def resample(
    table: PositionTable, sizes: Sizes, spec: ResizeSpec, strategy: Strategy, context: Context
) -> Tensor:
    """The table resampled to ``sizes``: packed (T, C), or padded (B, N, C).

    It is padded if the sizes have a ``length``; tokens after an image get zeros, or its first cell.
    """
    if context is None:
        return eager.resample(table, sizes, spec, strategy)
    (learned,) = table
    refuse_in_cuda_graph(learned.device, FROM_HOST)
    length = sizes.length
    if length is None:
        # Pad all images to the longest, and take the tokens that each has.
        if isinstance(sizes.values, Tensor) and is_tracing():
            raise ValueError(
                "in a graph, packed embeddings need sizes on the host: give a sequence, or a length"
            )
        counts = [t * h * w for t, h, w in sizes.on_host()]
        length = max(counts, default=0)

    on_device = sizes.as_tensor(length).to(learned.device, non_blocking=True)
    patch_coord = row_major(on_device, length, sizes.merge)
    padded = learned.new_zeros(*patch_coord.shape[:2], learned.shape[-1])
    # The tokens of later frames lie after those of the grid. The compiler of torch 2.4 cannot read
    # ``_replace``.
    with_padding = ResizeSpec(*spec[:-2], embeds_padding=True)
    add(padded, table, patch_coord, with_padding, strategy, context)
    if sizes.length is not None:
        if sizes.embeds_padding:
            return padded
        is_own = tokens_of_images(on_device, length)
        return padded.masked_fill(~is_own[..., None], 0)
    images = [image[:count] for image, count in zip(padded, counts)]
    no_image = padded[:0].flatten(0, 1)  # (0, C): so that there is something to concatenate
    return torch.cat([no_image, *images])
