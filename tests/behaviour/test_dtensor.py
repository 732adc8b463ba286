"""Tables that are DTensors.

Replicated ones count as the table that each rank holds, sharded ones are a named error.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.support.oracles import first, seeded, small_vit
from timm_naflex_fast import enable, status
from timm_naflex_fast import functional as fast

tensor = pytest.importorskip("torch.distributed.tensor")
if not hasattr(tensor, "DTensor"):
    pytest.skip("torch < 2.5 has DTensor under another name", allow_module_level=True)

SIZES = [(5, 7), (4, 3), (8, 2)]
COORD = torch.cartesian_prod(torch.arange(5), torch.arange(7)).expand(3, -1, -1)
TABLE = torch.randn(6, 5, 8, generator=seeded(0))
STRATEGIES = pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])


def by_coordinates(table, **how):
    return fast.add_pos_embed_(torch.zeros(3, 35, 8), table, COORD, **how)


def by_sizes(table, **how):
    return fast.add_pos_embed_(torch.zeros(3, 35, 8), table, grid_sizes=SIZES, **how)


def factorized(table, **how):
    """Its tables are DTensors too."""
    x = torch.zeros(3, 35, 8)
    return fast.add_factorized_pos_embed_(x, table[0], table[:, 0], COORD, **how)


def packed(table, **how):
    return fast.resample_pos_embeds(table, SIZES, mode="bilinear", **how)


def padded(table, **how):
    return fast.resample_pos_embeds(table, SIZES, mode="bilinear", length=40, **how)


def one(table, **how):
    return fast.resample_pos_embed(table, (9, 4))


LEARNED = by_coordinates, by_sizes, packed, padded, one


def result_and_gradient(function, table):
    table = table.detach().requires_grad_()
    result = function(table)
    weight = torch.linspace(-1, 1, result.numel()).view_as(result)
    (gradient,) = torch.autograd.grad((result * weight).sum(), table)
    return result.detach(), gradient


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@STRATEGIES
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("function", [*LEARNED, factorized])
def test_a_replicated_table_is_the_table_of_each_rank(mesh, strategy, function, compiled):
    if compiled and function not in (padded, by_coordinates):
        pytest.skip("one that resamples and one that adds will do")
    replicated = tensor.distribute_tensor(TABLE, mesh, [tensor.Replicate()])
    run = partial(function, strategy=strategy)
    want, want_gradient = result_and_gradient(run, TABLE)

    if compiled:
        run = torch.compile(run, backend="eager")
    got, gradient = result_and_gradient(run, replicated)

    assert isinstance(gradient, tensor.DTensor)
    assert gradient.placements == replicated.placements
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    torch.testing.assert_close(gradient.to_local(), want_gradient, atol=1e-5, rtol=1e-5)


@STRATEGIES
@pytest.mark.parametrize("axis", [0, 2])
def test_a_sharded_table_is_a_named_error(mesh, strategy, axis):
    sharded = tensor.distribute_tensor(TABLE, mesh, [tensor.Shard(axis)])
    for function in LEARNED:
        with pytest.raises(ValueError, match=r"table is a DTensor .*Shard.*full_tensor\(\)"):
            function(sharded, strategy=strategy)


def test_what_the_error_says_gives_a_sharded_gradient(mesh):
    sharded = tensor.distribute_tensor(TABLE, mesh, [tensor.Shard(0)]).requires_grad_()
    packed(sharded.full_tensor()).sum().backward()
    assert sharded.grad.placements == sharded.placements


def test_tokens_that_are_a_dtensor_are_a_named_error(mesh):
    tokens = tensor.distribute_tensor(torch.zeros(3, 35, 8), mesh, [tensor.Replicate()])
    with pytest.raises(ValueError, match=r"x is a DTensor.*to_local\(\)"):
        fast.add_pos_embed_(tokens, TABLE, COORD)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="this torch resizes no DTensor")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@torch.no_grad()
def test_a_model_of_dtensors_is_left_to_timm(mesh, compiled):
    """One image: timm's own loop mixes DTensors with plain tensors, which of one number it may."""
    embeds = small_vit(patch_size=2, embed_dim=8, pos_embed_grid_size=(6, 5)).embeds
    patches = torch.randn(1, 35, 4)
    coord = COORD[:1]
    want = first(embeds(patches, patch_coord=coord))
    tensor.distribute_module(embeds, mesh)
    patches = tensor.distribute_tensor(patches, mesh, [tensor.Replicate()])
    run = torch.compile(embeds, backend="eager") if compiled else embeds

    with enable():
        got = first(run(patches, patch_coord=coord))
        assert set(status().fallbacks) == {"a tensor of the class DTensor"}

    torch.testing.assert_close(got.to_local(), want, atol=2e-6, rtol=0)
