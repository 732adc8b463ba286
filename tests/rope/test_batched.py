"""Rotary embeddings: equal to timm's own, in every form, with their gradients."""

import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import Largest, relative, row_major
from tests.support.rotary import CLASSES, DEPTH, DIM, HEADS, NEW_TIMM, build, ours, stock
from timm_naflex_fast.rope import batched_rope, read_rope

if not CLASSES:
    pytest.skip("this timm's NaFlexVit has no rotary embeddings", allow_module_level=True)
FORMS = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
KINDS = pytest.mark.parametrize("kind", CLASSES)
PADDING = st.sampled_from([0, -1, -(2**31)])  # coordinates that are not looked at
GRIDS = [(9, 7), (3, 5), (9, 7), (16, 8)] * 4


@st.composite
def batches(draw):
    """Grids with repeats, a little padding; many samples of few grids, now and then."""
    side = st.integers(1, 12)
    distinct = draw(st.lists(st.tuples(side, side), min_size=1, max_size=5))
    sizes = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6))
    sizes = sizes * draw(st.sampled_from([1, 1, 20]))
    longest = max(h * w for h, w in sizes)
    return row_major(sizes, longest + draw(st.sampled_from([0, 0, 3])))


@st.composite
def ropes(draw, kind):
    options = draw(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([10.0, 100.0, 10000.0]),
                "grid_offset": st.sampled_from([0.0, 0.5, -0.25]),
                "grid_indexing": st.sampled_from(["ij", "xy"]),
                "rotate_half": st.booleans(),
                "mrope_section": st.sampled_from([(2, 3, 3), (8, 12, 12), (6, 1, 1)]),
            }
        )
    )
    if kind == "axial" and NEW_TIMM and draw(st.booleans()):
        side = st.integers(1, 20)
        options["ref_feat_shape"] = draw(st.tuples(side, side))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return build(kind, **options)


def frequency_grad(rope, tables, weights):
    return torch.autograd.grad((tables * weights).sum(), rope.freqs)[0]


@KINDS
@FORMS
@given(data=st.data())
def test_equals_timm_and_a_token_takes_the_cell_that_its_coordinate_names(kind, in_graph, data):
    """Reordered tokens too, and those that are left: timm refuses a batch shorter than a grid."""
    rope = data.draw(ropes(kind))
    coord = data.draw(batches())
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.float32]))
    batch, length, _ = coord.shape
    tokens = (coord.amax(1) + 1).prod(1, keepdim=True)
    is_padding = torch.arange(length) >= tokens
    # The last of the grid first, which tells the grid; padding last.
    place = torch.rand(batch, length).masked_fill(is_padding, 2)
    order = place.scatter(1, tokens - 1, -1).argsort(1)
    order = order[:, : data.draw(st.integers(1, length)), None]  # (B, N, 1)
    want = stock(rope, coord, prefix=data.draw(st.integers(0, 2)))

    named = coord.to(dtype).masked_fill(is_padding[..., None], data.draw(PADDING))
    got = ours(rope, named, in_graph)
    moved = ours(rope, named.take_along_dim(order, 1), in_graph)

    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    table = got.take_along_dim(order.unsqueeze(1).expand_as(moved), -2)
    torch.testing.assert_close(moved, table, rtol=0, atol=1e-6)
    assert ours(rope, coord[:0], in_graph).shape == want.narrow(-4, 0, 0).shape
    if kind == "mixed":
        weights = torch.randn(want.shape)
        gradient = frequency_grad(rope, got, weights)
        assert relative(gradient, frequency_grad(rope, want, weights)) <= 1e-5


@KINDS
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_of_tokens_and_models_equal_timms(kind, dtype, in_graph):
    rope = build(kind)
    coord = row_major(GRIDS)
    step = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0  # a tie may round the other way
    close = partial(torch.testing.assert_close, rtol=step, atol=2e-6)
    close(ours(rope, coord, in_graph, dtype), stock(rope, coord).to(dtype))
    if NEW_TIMM and dtype is not torch.float16:  # older timm keeps frequencies in that dtype
        # In float64 as far as timm goes: its positions are float32.
        want = stock(rope.to(dtype), coord, dtype=dtype)
        close(ours(rope, coord, in_graph, dtype), want)


def mixed_tables(rope, coord):
    return batched_rope(read_rope(rope), coord, torch.float32, traceable=False)


@pytest.mark.skipif(not NEW_TIMM, reason="mixed tables of older timm cannot be made in bfloat16")
def test_low_precision_gradients_are_no_worse_than_timms():
    rope = build("mixed")
    coord = row_major([(4, 5)] * 200)
    weights = torch.randn(DEPTH, 200, HEADS, 20, 2 * DIM).bfloat16()
    truth = frequency_grad(rope, stock(rope, coord), weights.float())

    def error(make):
        table = make(rope, coord, dtype=torch.bfloat16)
        return relative(frequency_grad(rope, table, weights), truth)

    assert error(ours) <= 1e-5 < error(stock)


@torch.no_grad()
def test_a_mixed_table_is_made_when_asked_for_and_let_go():
    tables = mixed_tables(build("mixed"), row_major([(9, 12)] * 8))
    table = next(iter(tables))
    watched = weakref.ref(table)
    del table
    assert watched() is None


def test_mixed_tables_keep_nothing_per_token_for_the_backward():
    """timm keeps what makes every block's table, of which there are four here."""
    nbytes = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        nbytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    coord = row_major([(9, 12), (4, 4), (12, 9)] * 8)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        tables = list(mixed_tables(build("mixed", depth=4), coord))

    assert 0 < sum(nbytes.values()) <= tables[0].nbytes


@KINDS
def test_one_huge_coordinate_makes_no_huge_table(kind):
    rope = build(kind)
    coord = row_major([(9, 7), (3, 5)] * 20)
    coord[1, 2, 0] = 1600  # a grid of 1601 x 5 cells
    tables_of_a_token = HEADS * DEPTH if kind == "mixed" else 1

    with Largest() as largest:
        got = ours(rope, coord)

    assert largest.elements <= 40 * 63 * 2 * DIM * tables_of_a_token
    torch.testing.assert_close(got, ours(rope, coord, in_graph=True), rtol=0, atol=2e-6)
    for wrong in (2**31 - 2, 2**31 - 1, -1):
        coord[1, 2, 0] = wrong
        with pytest.raises(ValueError, match="sample 1 holds a negative or non-finite coordinate"):
            ours(rope, coord)
