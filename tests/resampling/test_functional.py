"""The plain functions: shapes, dtypes and errors. Their numbers are tested strategy by strategy."""

import pytest
import torch
from oracles import row_major

from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    add_pos_embed_,
    resample_patch_kernel,
    resample_pos_embed,
)

COORD = row_major([(2, 3), (3, 2)])
STRATEGIES = ["matmul", "interpolate_cached", "grid_sample"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int16])
def test_in_place_any_coordinate_dtype_and_a_leading_one(strategy, dtype):
    x, table = torch.zeros(2, 6, 4), torch.randn(5, 5, 4)
    out = add_pos_embed_(x, table, COORD.to(dtype), strategy=strategy)
    assert out is x
    assert torch.equal(add_pos_embed_(torch.zeros(2, 6, 4), table[None], COORD, strategy=strategy), x)
    line = torch.randn(5, 4)
    x, y = torch.zeros(2, 6, 4), torch.zeros(2, 6, 4)
    assert add_factorized_pos_embed_(x, line, line, COORD.to(dtype), strategy=strategy) is x
    assert torch.equal(add_factorized_pos_embed_(y, line[None], line[None], COORD, strategy=strategy), x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_tables_are_resampled_in_float32(strategy):
    table = torch.randn(5, 5, 4).bfloat16()
    got = add_pos_embed_(torch.zeros(2, 6, 4), table, COORD, strategy=strategy)
    want = add_pos_embed_(torch.zeros(2, 6, 4), table.float(), COORD, strategy=strategy)
    assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_has_the_tables_dtype_and_shape(strategy):
    table = torch.randn(1, 5, 5, 4).bfloat16().requires_grad_()
    add_pos_embed_(torch.zeros(2, 6, 4), table, COORD, strategy=strategy).sum().backward()
    assert table.grad.shape == table.shape and table.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(strategy="stock"), "valid: 'interpolate_cached', 'grid_sample', 'matmul'"),
        (dict(mode="nearest"), "valid: 'bilinear', 'bicubic'"),
        (dict(table=torch.zeros(2, 5, 5, 4)), "table must have shape"),
        (dict(table=torch.zeros(5, 4)), "table must have shape"),
        (dict(x=torch.zeros(2, 6, 3)), "as wide as the table"),
        (dict(x=torch.zeros(2, 6, 4, dtype=torch.long)), "floating point"),
        (dict(patch_coord=COORD[:, :5]), "patch_coord must hold"),
        (dict(patch_coord=COORD - 1), "negative"),
        (dict(patch_coord=[[0, 0]]), "got list"),
    ],
)
def test_errors(change, message):
    x = torch.zeros(2, 6, 4)
    arguments = dict(x=x, table=torch.randn(5, 5, 4), patch_coord=COORD) | change
    with pytest.raises(ValueError) as error:
        add_pos_embed_(**arguments)
    assert message in str(error.value) and (x == 0).all()


def test_factorized_errors():
    with pytest.raises(ValueError, match="table_x must have shape"):
        add_factorized_pos_embed_(torch.zeros(2, 6, 4), torch.zeros(5, 4), torch.zeros(4), COORD)
    with pytest.raises(ValueError, match="strategy='nope'"):
        add_factorized_pos_embed_(torch.zeros(2, 6, 4), torch.zeros(5, 4), torch.zeros(5, 4), COORD, strategy="nope")


@pytest.mark.parametrize("bad", [dict(table=torch.zeros(5, 4)), dict(size=(0, 2)), dict(size=(2,)), dict(mode="area")])
def test_resample_pos_embed_errors(bad):
    with pytest.raises(ValueError):
        resample_pos_embed(**(dict(table=torch.zeros(5, 5, 4), size=(2, 3)) | bad))


@pytest.mark.parametrize("size", [2, (2.5, 2), ("a", 1), (0, 2), (2, 2, 2)])
def test_a_size_that_is_no_pair_of_integers(size):
    for resample, tensor in (
        (resample_pos_embed, torch.zeros(3, 3, 4)),
        (resample_patch_kernel, torch.zeros(2, 3, 4, 4)),
    ):
        with pytest.raises(ValueError, match=r"size must be \(h, w\)"):
            resample(tensor, size)


@pytest.mark.parametrize("wrong", [torch.zeros(5, 5, 4).numpy(), torch.zeros(5, 5, 4, dtype=torch.complex64)])
def test_what_is_no_tensor_of_real_numbers_is_named(wrong):
    with pytest.raises(ValueError, match="table must be a tensor of real numbers"):
        add_pos_embed_(torch.zeros(2, 6, 4), wrong, COORD)
    with pytest.raises(ValueError, match="table_y must be a tensor of real numbers"):
        add_factorized_pos_embed_(torch.zeros(2, 6, 4), wrong[0], torch.zeros(5, 4), COORD)
