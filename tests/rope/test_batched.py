"""Rotary embeddings: equal to timm's own, in every form, with their gradients."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from tests.support.oracles import Largest, relative, row_major
from tests.support.rotary import AUGMENTED, CLASSES, DEPTH, DIM, HEADS, NEW_TIMM, build, ours, stock
from timm_naflex_fast.rope.batched import batched_rope
from timm_naflex_fast.rope.modules import read_rope

CHANGES = [dict(shift_coords=0.3), dict(jitter_coords=1.4), dict(rescale_coords=2.0)]
CHANGES += [dict(shift_coords=0.2, jitter_coords=1.3, rescale_coords=1.7)]


@st.composite
def batches(draw):
    """Grids with repeats; a little padding; a batch too large for the form for few tokens, now and
    then."""
    side = st.integers(1, 12)
    distinct = draw(st.lists(st.tuples(side, side), min_size=1, max_size=5))
    sizes = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6)) * draw(
        st.sampled_from([1, 1, 20])
    )
    return row_major(sizes, max(h * w for h, w in sizes) + draw(st.sampled_from([0, 0, 3])))


@st.composite
def ropes(draw, kind):
    options = dict(
        temperature=draw(st.sampled_from([10.0, 100.0, 10000.0])),
        grid_offset=draw(st.sampled_from([0.0, 0.5, -0.25])),
        grid_indexing=draw(st.sampled_from(["ij", "xy"])),
        rotate_half=draw(st.booleans()),
        normalize_coords=draw(st.sampled_from(["separate", "min", "max"]))
        if kind == "dinov3"
        else "separate",
        mrope_section=draw(st.sampled_from([(2, 3, 3), (8, 12, 12), (6, 1, 1)])),
    )
    if kind == "axial" and draw(st.booleans()):
        options["ref_feat_shape"] = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return build(kind, **options)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
@given(data=st.data())
def test_equals_timm(kind, in_graph, data):
    rope, coord = data.draw(ropes(kind)), data.draw(batches())
    want = stock(rope, coord, prefix=data.draw(st.integers(0, 2)))
    got = ours(
        rope,
        coord.to(data.draw(st.sampled_from([torch.int64, torch.int32, torch.float32]))),
        in_graph,
    )
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    tokens, length = (coord.amax(1) + 1).prod(1), coord.shape[1]
    got = got.movedim(-2, -1).movedim(-4, -2)  # (..., B, N)
    assert (
        got[..., torch.arange(length) >= tokens[:, None]] == 0
    ).all()  # padding: zeros, also where timm has them
    # Reordered tokens take the cells that their coordinates name, and so do those that are left
    # when some are dropped: timm refuses a batch shorter than a grid. The corner tells the grid;
    # padding stays at the end.
    shuffled = lambda n: torch.cat(
        [torch.tensor([n - 1]), torch.randperm(n - 1), torch.arange(n, length)]
    )
    order = torch.stack([shuffled(n) for n in tokens.tolist()])[
        :, : data.draw(st.integers(1, length))
    ]
    moved = ours(rope, coord.gather(1, order[..., None].expand(-1, -1, 2)), in_graph)
    moved = moved.movedim(-2, -1).movedim(-4, -2)
    torch.testing.assert_close(moved, got.gather(-1, order.expand_as(moved)), rtol=0, atol=1e-6)
    assert ours(rope, coord[:0], in_graph).shape == want.narrow(-4, 0, 0).shape


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("of", ["tokens", "model"])
def test_other_dtypes(kind, dtype, of):
    rope, coord = build(kind), row_major([(9, 7), (3, 5), (9, 7), (16, 8)] * 4)
    if of == "tokens":
        want = stock(rope, coord).to(dtype)
    elif NEW_TIMM and dtype is not torch.float16:
        want = stock(
            rope.to(dtype), coord, dtype=dtype
        )  # in float64 as far as timm goes: its positions are float32
    else:
        pytest.skip("older timm keeps its frequencies in the model's dtype")
    for in_graph in (False, True):
        got = ours(rope, coord, in_graph, dtype)
        assert got.dtype == want.dtype
        step = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0  # a tie may round the other way
        torch.testing.assert_close(got, want, rtol=step, atol=2e-6)


@pytest.mark.skipif(
    "dinov3" not in CLASSES or NEW_TIMM, reason="newer timm keeps periods in float32 at least"
)
def test_low_precision_periods_stay_with_timm():
    assert "periods" in read_rope(build("dinov3").bfloat16())


@pytest.mark.parametrize("kind", AUGMENTED)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "+".join(change))
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_random_coordinates_are_timms_for_the_same_seed(kind, change, indexing):
    for coord in (row_major([(9, 7), (3, 5), (9, 7), (16, 8), (1, 4)] * 4), row_major([(3, 5)])):
        rope = build(kind, grid_indexing=indexing, **change)
        torch.manual_seed(3)
        want, after = stock(rope, coord), torch.rand(())
        torch.manual_seed(3)
        torch.testing.assert_close(ours(rope, coord), want, rtol=0, atol=5e-6)
        assert torch.rand(()) == after  # as many numbers were drawn
        still = stock(rope.eval(), coord)
        assert not torch.allclose(still, want, atol=1e-3)
        torch.testing.assert_close(ours(rope, coord), still, rtol=0, atol=2e-6)


def frequency_grad(rope, tables, weights):
    return torch.autograd.grad(
        sum((table * weight).sum() for table, weight in zip(tables, weights)), rope.freqs
    )[0]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
@given(data=st.data())
def test_gradients_of_mixed_frequencies(in_graph, data):
    rope, coord = data.draw(ropes("mixed")), data.draw(batches())
    tables = stock(rope, coord)
    weights = torch.randn(tables.shape, generator=torch.Generator().manual_seed(0))
    want = frequency_grad(rope, tables, weights)
    got = frequency_grad(
        rope, batched_rope(read_rope(rope), coord, torch.float32, traceable=in_graph), weights
    )
    assert relative(got, want) <= 1e-5


@pytest.mark.skipif(not NEW_TIMM, reason="mixed tables of older timm cannot be made in bfloat16")
def test_low_precision_gradients_are_no_worse_than_timms():
    rope, coord = build("mixed"), row_major([(4, 5)] * 200)
    weights = torch.randn(DEPTH, 200, HEADS, 20, 2 * DIM).bfloat16()
    truth = frequency_grad(rope, stock(rope, coord), weights.float())
    tables = [make(rope, coord, dtype=torch.bfloat16) for make in (stock, ours)]
    theirs, got = (relative(frequency_grad(rope, table, weights), truth) for table in tables)
    assert got <= 1e-5 < theirs


def test_mixed_tables_are_an_iterator_that_starts_anew_and_keep_nothing_per_token():
    rope, coord = build("mixed", depth=4), row_major([(9, 12), (4, 4), (12, 9)] * 8)
    tables = batched_rope(read_rope(rope), coord, torch.float32)
    first, second, *rest = (next(tables) for _ in range(4))
    assert next(tables, None) is None and len(rest) == 2
    for _ in range(2):
        again = list(tables)
        assert len(again) == 4 and torch.equal(again[0], first) and torch.equal(again[1], second)
    del first, second, again
    with torch.no_grad():
        first = next(iter(tables))
        watched = weakref.ref(first)
        del first
        assert watched() is None  # made when asked for, and let go
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage()) or t, lambda t: t
    ):
        kept = list(batched_rope(read_rope(rope), coord, torch.float32))
    nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in saved}.values())
    assert 0 < nbytes <= kept[0].nbytes  # timm keeps what makes every block's table, 4 of them here


@pytest.mark.parametrize("kind", CLASSES)
def test_one_huge_coordinate_makes_no_huge_table(kind):
    rope, coord = build(kind), row_major([(9, 7), (3, 5)] * 20)
    coord[1, 2, 0] = 2**31 - 2
    with Largest() as largest:
        got = ours(rope, coord)
    assert largest.elements <= 40 * 63 * 2 * DIM * (HEADS * DEPTH if kind == "mixed" else 1)
    torch.testing.assert_close(got, ours(rope, coord, in_graph=True), rtol=0, atol=2e-6)
    coord[1, 2, 0] += 1
    with pytest.raises(
        ValueError, match="sample 1 holds a negative or non-finite coordinate, or one beyond"
    ):
        ours(rope, coord)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copies", [1, 20], ids=["few tokens", "many tokens"])
def test_coordinates_of_padding_are_not_looked_at(kind, copies):
    rope, coord = build(kind), row_major([(9, 7), (3, 5)] * copies)
    want, past = ours(rope, coord), torch.arange(63) >= (coord.amax(1) + 1).prod(1)[:, None]
    for dtype, value in (
        (torch.int64, -1),
        (torch.int64, -(2**40)),
        (torch.float32, float("nan")),
        (torch.int64, 2),
    ):
        other = coord.to(dtype).masked_fill(past[..., None], value)
        for in_graph in (False, True)[: 1 + (dtype is torch.int64)]:
            torch.testing.assert_close(ours(rope, other, in_graph), want, rtol=0, atol=2e-6)
    coord[1, 14] = -1  # the last token of a grid is no padding
    with pytest.raises(ValueError, match="sample 1 holds a negative"):
        ours(rope, coord)


@pytest.mark.parametrize("batch", [1, 90], ids=["by the formula", "by cells"])
def test_many_gradients_in_one_call(batch):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them; and the gradient of
    those."""
    rope, coord = build("mixed"), row_major([(4, 3)] * batch)
    table = next(iter(batched_rope(read_rope(rope), coord, torch.float32)))
    weights = torch.randn(5, *table.shape)
    together = torch.autograd.grad(
        table, rope.freqs, weights, create_graph=True, is_grads_batched=True
    )[0]
    in_turn = torch.stack(
        [torch.autograd.grad(table, rope.freqs, w, create_graph=True)[0] for w in weights]
    )
    assert relative(together, in_turn) <= 1e-5
    got, want = (
        torch.autograd.grad(g.square().sum(), rope.freqs, retain_graph=True)[0]
        for g in (together, in_turn)
    )
    assert relative(got, want) <= 1e-5


@pytest.mark.parametrize("batch", [1, 90], ids=["by the formula", "by cells"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "in graph"])
def test_forward_mode_by_the_frequencies(batch, in_graph):
    rope, coord = build("mixed"), row_major([(4, 3), (3, 4)] * batch)[:batch]
    values, upstream = rope.freqs.detach(), torch.randn(DEPTH, batch, HEADS, 12, 2 * DIM)
    del rope.freqs
    with forward_ad.dual_level():
        rope.freqs = forward_ad.make_dual(values.requires_grad_(), torch.randn_like(values))
        tables = stock(rope, coord), ours(rope, coord, in_graph)
        got, want = (forward_ad.unpack_dual(table).tangent for table in tables)
        assert relative(got, want) <= 1e-5
        # The tangent of a gradient: forward over reverse.
        grads = [
            torch.autograd.grad((t.square() * upstream).sum(), values, create_graph=True)[0]
            for t in tables
        ]
        theirs, mine = (forward_ad.unpack_dual(grad).tangent for grad in grads)
        assert relative(mine, theirs) <= 1e-5
