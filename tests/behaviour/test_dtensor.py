"""Tables that are DTensors: replicated ones count as the table that each rank holds, sharded ones
are a named error."""

import pytest
import torch
import torch.distributed as dist

from tests.support.oracles import small_vit
from timm_naflex_fast import enable, status
from timm_naflex_fast import functional as fast

tensor = pytest.importorskip("torch.distributed.tensor")
if not hasattr(tensor, "DTensor"):
    pytest.skip("torch < 2.5 has DTensor under another name", allow_module_level=True)

SIZES = [(5, 7), (4, 3), (8, 2)]
COORD = torch.cartesian_prod(torch.arange(5), torch.arange(7)).expand(3, -1, -1)
TABLE = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))


def functions(strategy):
    """Every function that takes a table, by name: a table in, embeddings out."""
    x, options = lambda: torch.zeros(3, 35, 8), dict(mode="bilinear", strategy=strategy)
    return {
        "packed": lambda t: fast.resample_pos_embeds(t, SIZES, **options),
        "padded": lambda t: fast.resample_pos_embeds(t, SIZES, length=40, **options),
        "one": lambda t: fast.resample_pos_embed(t, (9, 4)),
        "coordinates": lambda t: fast.add_pos_embed_(x(), t, COORD, **options),
        "sizes": lambda t: fast.add_pos_embed_(x(), t, grid_sizes=SIZES, **options),
        "factorized": lambda t: fast.add_factorized_pos_embed_(
            x(), t[0], t[:, 0], COORD, strategy=strategy
        ),
    }


def result_and_gradient(function, table):
    table = table.detach().requires_grad_()
    result = function(table)
    (gradient,) = torch.autograd.grad(
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum(), table
    )
    return result.detach(), gradient


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_a_replicated_table_is_the_table_of_each_rank(mesh, strategy):
    whole, runs = tensor.distribute_tensor(TABLE, mesh, [tensor.Replicate()]), functions(strategy)
    runs |= {
        f"{name}, compiled": torch.compile(runs[name], backend="eager")
        for name in ("padded", "coordinates")
    }
    for name, function in runs.items():
        want, want_gradient = result_and_gradient(function, TABLE)
        got, gradient = result_and_gradient(function, whole)
        assert isinstance(gradient, tensor.DTensor) and gradient.placements == whole.placements, (
            name
        )
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0, msg=name)
        torch.testing.assert_close(
            gradient.to_local(), want_gradient, atol=1e-5, rtol=1e-5, msg=name
        )


def test_a_sharded_table_and_tokens_that_are_a_dtensor_are_named_errors(mesh):
    for strategy in ("matmul", "interpolate_cached"):
        for name, function in functions(strategy).items():
            # The parts of "factorized" are DTensors too.
            for placement in (tensor.Shard(0), tensor.Shard(2)) * (name != "factorized"):
                with pytest.raises(
                    ValueError, match=r"table is a DTensor .*Shard.*full_tensor\(\)"
                ):
                    function(tensor.distribute_tensor(TABLE, mesh, [placement]))
    sharded = tensor.distribute_tensor(TABLE, mesh, [tensor.Shard(0)]).requires_grad_()
    fast.resample_pos_embeds(
        sharded.full_tensor(), SIZES, mode="bilinear"
    ).sum().backward()  # what the error says
    assert sharded.grad.placements == sharded.placements
    tokens = tensor.distribute_tensor(torch.zeros(3, 35, 8), mesh, [tensor.Replicate()])
    with pytest.raises(ValueError, match=r"x is a DTensor.*to_local\(\)"):
        fast.add_pos_embed_(tokens, TABLE, COORD)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="this torch resizes no DTensor")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_dtensors_is_left_to_timm(mesh, compiled):
    """One image, because timm's own loop mixes DTensors with plain tensors: of one number it
    may."""
    embeds, patches = (
        small_vit(patch_size=2, embed_dim=8, pos_embed_grid_size=(6, 5)).embeds,
        torch.randn(1, 35, 4),
    )
    with torch.no_grad():
        want = embeds(patches, patch_coord=COORD[:1])[0]
        tensor.distribute_module(embeds, mesh)
        patches = tensor.distribute_tensor(patches, mesh, [tensor.Replicate()])
        with enable():
            got = (torch.compile(embeds, backend="eager") if compiled else embeds)(
                patches, patch_coord=COORD[:1]
            )[0]
            assert set(status().fallbacks) == {"a tensor of the class DTensor"}
    torch.testing.assert_close(got.to_local(), want, atol=2e-6, rtol=0)
