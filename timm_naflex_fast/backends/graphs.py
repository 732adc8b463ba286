"""Position tables in graphs, where nothing may be read on the host.

| who calls | what computes |
| --- | --- |
| ``torch.compile``, or a mode that watches operators, on a CPU or CUDA | ``operator``: one operator, inside which ``eager`` runs |
| ``torch.export``, ``torch.jit.trace``, ``make_fx``, ``torch.func``, CUDA graphs; any other device | ``traceable``: plain operations |

``tracing.context_of`` tells them apart, and from eager code. In a graph of ``traceable`` every strategy
computes the result of its ``reference`` in the same way. ``patching`` decides before: in an eager model
under ``torch.func`` timm's own code runs.

``tests/contract/test_backends.py`` tests every way.
"""

import torch
from torch import Tensor

from ..batch.sizes import Sizes, coordinates_in_graph, row_major
from ..batch.tokens import TokenLayout, check_tokens, tokens_of_images
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
    """``eager.add``, or the same in the graph that ``context`` names.

    Raises:
        RuntimeError: in a CUDA graph, what lies on the host.
    """
    if context is None:
        eager.add(x, table, layout, spec, strategy)
        return
    # A compiler may know nothing of a size until the graph runs: there the operator checks.
    check_tokens(x, table[0].shape[-1], None if context == "operator" else layout)
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
    """``eager.resample``, or the same in the graph that ``context`` names."""
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
    with_padding = ResizeSpec(*spec[:-1], embeds_padding=True)
    add(padded, table, patch_coord, with_padding, strategy, context)
    if sizes.length is not None:
        if sizes.embeds_padding:
            return padded
        is_own = tokens_of_images(on_device, length)
        return padded.masked_fill(~is_own[..., None], 0)
    images = [image[:count] for image, count in zip(padded, counts)]
    no_image = padded[:0].flatten(0, 1)  # (0, C): so that there is something to concatenate
    return torch.cat([no_image, *images])
