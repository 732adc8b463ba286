"""The plain functions: shapes, dtypes and errors. Their numbers are tested strategy by strategy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checks import one_by_one
from tests.support.oracles import Largest, relative, row_major
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    add_pos_embed_,
    resample_pos_embed,
    resample_pos_embeds,
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


@pytest.mark.parametrize("wrong", [torch.zeros(5, 5, 4).numpy(), torch.zeros(5, 5, 4, dtype=torch.complex64)])
def test_what_is_no_tensor_of_real_numbers_is_named(wrong):
    with pytest.raises(ValueError, match="table must be a tensor of real numbers"):
        add_pos_embed_(torch.zeros(2, 6, 4), wrong, COORD)
    with pytest.raises(ValueError, match="table_y must be a tensor of real numbers"):
        add_factorized_pos_embed_(torch.zeros(2, 6, 4), wrong[0], torch.zeros(5, 4), COORD)


MODES = ["bilinear", "bicubic"]
sides = st.integers(1, 12)


@settings(max_examples=150)
@given(
    st.tuples(sides, sides),
    st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["matmul", "interpolate_cached"]),
    st.sampled_from([None, "zeros", "first"]),
)
def test_equals_interpolate_with_gradients(size, grids, mode, antialias, corners, ar, merge, strategy, padding):
    grids = [(t, h * merge, w * merge) for t, h, w in grids]
    table = torch.randn(*size, 3, requires_grad=True)
    how = dict(mode=mode, antialias=antialias, align_corners=corners, ar_preserving=ar, merge=merge)
    want = one_by_one(table, grids, **how)
    if padding is not None:
        length = max(len(image) for image in want) + 2
        fill = [image[:1] if padding == "first" else image[:1] * 0 for image in want]
        want = [torch.cat([image, f.expand(length - len(image), -1)]) for image, f in zip(want, fill)]
        want, extra = torch.stack(want), dict(length=length, padding=padding)
    else:
        want, extra = torch.cat(want), {}
    got = resample_pos_embeds(table, torch.tensor(grids), strategy=strategy, **how, **extra)
    assert got.shape == want.shape and got.dtype == table.dtype
    assert (got - want).abs().max() <= 2e-6 * max(1.0, table.abs().max().item())
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want)]
    assert relative(*grads) <= 1e-5
    with torch.no_grad():
        for _ in range(3):  # kept tables too
            assert (resample_pos_embeds(table, grids, strategy=strategy, **how, **extra) - got).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_computed_in_float32_at_least_and_cast_once(dtype, mode):
    table = torch.randn(1, 16, 16, 64, dtype=dtype)
    want = torch.cat(one_by_one(table[0], [(7, 30), (16, 16), (5, 1)], mode=mode))
    got = resample_pos_embeds(table, [(7, 30), (16, 16), (5, 1)], mode=mode)
    assert got.dtype == dtype
    assert relative(got, want) <= max(torch.finfo(dtype).eps / 2, 1e-12) + 1e-6 * (dtype != torch.float64)


def test_linear_in_tokens_and_no_loop_over_images_in_the_backward():
    table, sizes = torch.randn(16, 16, 8, requires_grad=True), [(9, 28)] * 40
    with Largest() as largest:
        out = resample_pos_embeds(table, sizes, mode="bilinear")
    nodes, todo = 0, [out.grad_fn]
    while todo:
        node = todo.pop()
        nodes += 1
        todo += [n for n, _ in node.next_functions if n is not None]
    assert largest.elements <= 40 * 252 * 8 and nodes <= 4


def test_sizes_on_the_host_are_read_from_no_tensor(monkeypatch):
    def no_read(*args, **kwargs):
        raise AssertionError("read back")

    table = torch.randn(6, 5, 4)
    want = resample_pos_embeds(table, [(3, 4), (8, 2)], mode="bilinear")
    for read in ("tolist", "item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, read, no_read)
    got = resample_pos_embeds(table.clone(), ((3, 4), (8, 2)), mode="bilinear")
    monkeypatch.undo()
    assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
def test_add_pos_embed_takes_sizes_in_place_of_coordinates(strategy):
    sizes, x, table = [(3, 4), (9, 2), (6, 5)], torch.randn(3, 30, 4), torch.randn(6, 5, 4)
    want = add_pos_embed_(x.clone(), table, row_major(sizes), strategy=strategy, mode="bilinear")
    assert not torch.equal(want, x)
    for given_sizes in (sizes, torch.tensor(sizes)):
        assert torch.equal(
            add_pos_embed_(x.clone(), table, grid_sizes=given_sizes, strategy=strategy, mode="bilinear"), want
        )


TABLE = torch.randn(6, 5, 4)
SIZES = [(4, 4), (2, 6)]


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(merge=3), "merge must divide every height and width; 3 does not divide 4 x 4"),
        (dict(merge=0), "merge must be an integer of at least 1"),
        (dict(length=15), "image 0 has 16 tokens, length is 15"),
        (dict(grid_sizes=[(4, 0)]), "integers of at least 1"),
        (dict(grid_sizes=[(4, 4.0)]), "integers of at least 1"),
        (dict(grid_sizes=[(1, 2, 3, 4)]), r"shape \(B, 2\) or \(B, 3\)"),
        (dict(grid_sizes=torch.zeros(2)), r"shape \(B, 2\) or \(B, 3\)"),
        (dict(padding="last"), "'last' is not valid; valid: 'zeros', 'first'"),
        (dict(mode="nearest"), "valid: 'bilinear', 'bicubic'"),
        (dict(strategy="fast"), "valid: 'interpolate_cached', 'grid_sample', 'matmul'"),
        (dict(table=torch.randn(5, 4)), r"shape \(H0, W0, C\)"),
        (dict(table=torch.randn(2, 6, 5, 4)), r"shape \(H0, W0, C\)"),
        (dict(table=torch.zeros(6, 5, 4, dtype=torch.int64)), "floating point"),
    ],
)
def test_resample_pos_embeds_errors(change, message):
    arguments = dict(table=TABLE, grid_sizes=SIZES, mode="bilinear") | change
    with pytest.raises(ValueError, match=message):
        resample_pos_embeds(arguments.pop("table"), arguments.pop("grid_sizes"), **arguments)


def test_mode_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        resample_pos_embeds(TABLE, SIZES)


def test_errors_about_sizes_for_tokens_change_nothing():
    x = torch.zeros(2, 16, 4)
    for wrong, message in (([(4, 4)], "one size for each of the 2"), ([(4, 4), (9, 2)], "image 1 has 18 tokens")):
        with pytest.raises(ValueError, match=message):
            add_pos_embed_(x, TABLE, grid_sizes=wrong)
    for both in (dict(), dict(patch_coord=row_major([(4, 4)] * 2), grid_sizes=[(4, 4)] * 2)):
        with pytest.raises(ValueError, match="either patch_coord or grid_sizes"):
            add_pos_embed_(x, TABLE, **both)
    assert (x == 0).all()


def test_no_image_at_all():
    assert resample_pos_embeds(TABLE, [], mode="bilinear").shape == (0, 4)
    assert resample_pos_embeds(TABLE, torch.zeros(0, 2, dtype=torch.int64), mode="bilinear", length=5).shape == (
        0,
        5,
        4,
    )
