"""Every strategy in one compiled graph; see contract/ for the operator's own result."""

import re
from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.oracles import (
    NEW_TIMM,
    OLD_TORCH,
    relative,
    small_vit,
    trained,
    vit_batch,
    worst,
)
from tests.support.running import running
from timm_naflex_fast import __version__
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.pos_embed.graphs import add_learned, learned_grad

INTERPOLATE = "interpolate_cached"
VARIOUS = [[(3, 4)] * 2, [(8, 8), (2, 30), (11, 3)], [(9, 1), (1, 1)] * 2, [(5, 7)] * 5]
pytestmark = pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")


@pytest.fixture
def counter():
    """A compiler's backend that counts its graphs."""
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="older torch has no tag")
def test_no_cuda_graph_may_hold_the_operator():
    assert torch.Tag.cudagraph_unsafe in add_learned._opoverload.tags


@pytest.mark.parametrize("operator", [add_learned, learned_grad])
def test_a_graph_that_another_release_left_on_disk_is_not_found(operator):
    """The compiler finds it by the names of its operators, and the backward pass is in it."""
    assert re.sub(r"\W", "_", __version__) in operator._opoverload.name()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*product(["matmul", INTERPOLATE], ["learned", "factorized"]), ("grid_sample", "learned")],
)
def test_other_sizes_need_one_more_graph_at_most(counter, mode, kind):
    """Those of a learned table by interpolate_cached have the bits of eager code, which are timm's."""
    if mode == "grid_sample" and not NEW_TIMM:
        pytest.skip("reads the largest grid")
    model = small_vit(pos_embed=kind, depth=0)
    graph = torch.compile(model, backend=counter, fullgraph=True)
    rounding = 0 if (mode, kind) == (INTERPOLATE, "learned") else 1e-6
    with running(mode, strict=True):
        for sizes in VARIOUS:
            batch = vit_batch(sizes)
            want, want_grads = trained(model, batch)
            got, grads = trained(model, batch, graph)
            assert relative(got, want) <= rounding
            assert worst(grads, want_grads) <= 1e-5
    assert counter.frame_count <= 2


def test_coordinates_of_another_shape_are_named_in_a_compiled_graph():
    compiled = torch.compile(add_pos_embed_, backend="eager")
    coord = torch.cartesian_prod(torch.arange(3), torch.arange(4))  # (12, 2)
    for wrong in (coord, coord[None], coord.expand(3, -1, -1)):
        with pytest.raises(ValueError, match=r"patch_coord must hold .* shape \(4, 12, 2\)"):
            compiled(torch.zeros(4, 12, 8), torch.zeros(5, 5, 8), wrong)
