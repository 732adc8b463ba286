"""The plain functions: shapes, dtypes and errors. Their numbers are tested strategy by strategy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checks import one_by_one
from tests.support.oracles import Largest, relative, row_major
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES

COORD = row_major([(2, 3), (3, 2)])
TABLE, LINE = torch.randn(5, 5, 4), torch.randn(5, 4)
sides, flags, few = st.integers(1, 12), st.booleans(), st.integers(1, 3)
how = dict.fromkeys(("antialias", "align_corners", "ar_preserving"), flags) | dict(merge=few)
how["mode"] = st.sampled_from(["bilinear", "bicubic"])
frames = st.lists(st.tuples(few, sides, sides), min_size=1, max_size=5)


def embedded(table=TABLE, coord=COORD, **options):
    """What ``add_pos_embed_`` adds to zeros."""
    x = torch.zeros(2, 6, 4)
    assert fast.add_pos_embed_(x, table, coord, **options) is x
    return x


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_what_else_describes_the_same(strategy):
    """A leading 1, sizes in place of coordinates, and bfloat16 tables: those are resampled in
    float32."""
    want = embedded(strategy=strategy)
    assert want.abs().max() > 0.1 and torch.equal(embedded(TABLE[None], strategy=strategy), want)
    for sizes in ([(2, 3), (3, 2)], torch.tensor([(2, 3), (3, 2)])):
        assert torch.equal(embedded(coord=None, grid_sizes=sizes, strategy=strategy), want)
    half = TABLE[None].bfloat16().requires_grad_()
    got = embedded(half, strategy=strategy)
    assert torch.equal(got, embedded(TABLE.bfloat16().float(), strategy=strategy))
    plain = dict(strategy=strategy, mode="bilinear", antialias=False)
    assert torch.equal(embedded(half, **plain), embedded(TABLE.bfloat16().float(), **plain))
    got.sum().backward()
    assert half.grad.shape == half.shape and half.grad.dtype == torch.bfloat16
    x, y = torch.zeros(2, 6, 4), torch.zeros(2, 6, 4)
    assert fast.add_factorized_pos_embed_(x, LINE, LINE, COORD, strategy=strategy) is x
    assert torch.equal(
        fast.add_factorized_pos_embed_(y, LINE[None], LINE[None], COORD, strategy=strategy), x
    )


NO_NUMBERS = [torch.zeros(5, 5, 4).numpy(), torch.zeros(5, 5, 4, dtype=torch.complex64)]
NO_SIZES = [
    (dict(size=size), r"^size must be \(h, w\)")
    for size in (2, (2.5, 2), ("a", 1), (0, 2), (2, 2, 2))
]
NAMES, MODES = (
    "valid: 'interpolate_cached', 'grid_sample', 'matmul'",
    "valid: 'bilinear', 'bicubic'",
)
WRONG = {
    fast.add_pos_embed_: [
        (dict(strategy="stock"), NAMES),
        (dict(mode="nearest"), MODES),
        (dict(table=torch.zeros(2, 5, 5, 4)), "table must have shape"),
        (dict(table=LINE), "table must have shape"),
        *[(dict(table=table), "table must be a tensor of real numbers") for table in NO_NUMBERS],
        (dict(x=torch.zeros(2, 6, 3)), "as wide as the table"),
        (dict(x=torch.zeros(2, 6, 4, dtype=torch.long)), "floating point"),
        (dict(patch_coord=COORD[:, :5]), r"patch_coord must hold .*; got \(2, 5, 2\)"),
        *[
            (dict(patch_coord=COORD * 0 + torch.tensor(cell)), "negative")
            for cell in ((-1, 0), (0, -1))
        ],
        *[
            (dict(patch_coord=COORD.to(dtype)), "integers|real numbers")
            for dtype in (torch.bool, torch.complex64)
        ],
        (dict(patch_coord=[[0, 0]]), "got list"),
        (dict(patch_coord=None), "either patch_coord or grid_sizes"),
        (dict(grid_sizes=[(2, 3), (3, 2)]), "either patch_coord or grid_sizes"),
        (
            dict(patch_coord=None, grid_sizes=[(1, 2, 3)]),
            r"hold \(h, w\) for each image, .* shape \(B, 2\); got",
        ),
        (dict(patch_coord=None, grid_sizes=[(2, 3)]), "one size for each of the 2"),
        (dict(patch_coord=None, grid_sizes=[(2, 3), (4, 2)]), "image 1 has 8 tokens"),
    ],
    fast.add_factorized_pos_embed_: [
        (dict(table_x=torch.zeros(4)), "table_x must have shape"),
        (dict(table_x=torch.zeros(5, 3)), "of one width"),
        *[
            (dict(table_y=table[0]), "table_y must be a tensor of real numbers")
            for table in NO_NUMBERS
        ],
        (dict(strategy="nope"), "strategy='nope' is not a strategy"),
    ],
    fast.resample_pos_embed: [
        (dict(table=LINE), r"shape \(H0, W0, C\)"),
        (dict(mode="area"), MODES),
        *NO_SIZES,
    ],
    fast.resample_patch_kernel: [
        (dict(weight=TABLE), r"\(O, I, H0, W0\)"),
        (dict(mode="nearest"), MODES),
        *NO_SIZES,
    ],
    fast.resize_matrix: [(dict(mode="nearest"), MODES), (dict(n=0), "n and n0 must be lengths")],
    fast.resample_pos_embeds: [
        (
            dict(grid_sizes=[(3, 4)], merge=3),
            "merge must divide every height and width; 3 does not divide 3 x 4",
        ),
        (dict(merge=0), "merge must be an integer of at least 1"),
        (dict(length=15), "image 0 has 16 tokens, length is 15"),
        (dict(grid_sizes=[(4, 0)]), "integers of at least 1"),
        (dict(grid_sizes=torch.zeros(2)), r"shape \(B, 2\) or \(B, 3\)"),
        (dict(padding="last"), "'last' is not valid; valid: 'zeros', 'first'"),
        (dict(mode="nearest"), MODES),
        (dict(strategy="fast"), NAMES),
        (dict(table=LINE), r"shape \(H0, W0, C\)"),
        (dict(table=TABLE.long()), "floating point"),
    ],
}
RIGHT = {
    fast.add_pos_embed_: dict(x=None, table=TABLE, patch_coord=COORD),
    fast.add_factorized_pos_embed_: dict(x=None, table_y=LINE, table_x=LINE, patch_coord=COORD),
    fast.resample_pos_embed: dict(table=TABLE, size=(2, 3)),
    fast.resample_patch_kernel: dict(weight=torch.zeros(2, 3, 4, 4), size=(2, 3)),
    fast.resize_matrix: dict(n=3, n0=4),
    fast.resample_pos_embeds: dict(table=TABLE, grid_sizes=[(4, 4), (2, 6)], mode="bilinear"),
}


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [(function, *wrong) for function in WRONG for wrong in WRONG[function]],
)
def test_errors_name_what_is_valid_and_change_nothing(function, change, message):
    x = dict(x=torch.zeros(2, 6, 4)) if "x" in RIGHT[function] else {}
    arguments = RIGHT[function] | x | change
    with pytest.raises(ValueError, match=message):
        function(**arguments)
    assert not x or not arguments["x"].any()


def test_the_mode_of_packed_embeddings_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        fast.resample_pos_embeds(TABLE, [(4, 4)])


@pytest.mark.parametrize("padding", [None, "zeros", "first"])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@given(st.tuples(sides, sides), frames, st.fixed_dictionaries(how))
def test_equals_interpolate_with_gradients(padding, strategy, size, grids, how):
    grids = [(t, h * how["merge"], w * how["merge"]) for t, h, w in grids]
    table, extra = torch.randn(*size, 3, requires_grad=True), {}
    want = one_by_one(table, grids, dtype=torch.float32, **how)
    if padding is not None:
        extra = dict(length=max(map(len, want)) + 2, padding=padding)
        fill = [image[:1] * (padding == "first") for image in want]
        want = [
            torch.cat([i, f.expand(extra["length"] - len(i), -1)])[None] for i, f in zip(want, fill)
        ]
    want = torch.cat(want)
    got = fast.resample_pos_embeds(table, torch.tensor(grids), strategy=strategy, **how, **extra)
    assert got.shape == want.shape and got.dtype == table.dtype
    rounding = 2e-6 * max(1.0, table.abs().max().item()) if strategy == "matmul" else 0
    assert (got - want).abs().max() <= rounding
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want)]
    assert relative(*grads) <= 1e-5
    with torch.no_grad():
        for _ in range(3):  # kept tables too
            assert (
                fast.resample_pos_embeds(table, grids, strategy=strategy, **how, **extra) - got
            ).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_computed_in_float32_at_least_and_cast_once(dtype, mode, antialias):
    table = torch.randn(1, 16, 16, 64, dtype=dtype)
    want = torch.cat(
        one_by_one(table[0], [(7, 30), (16, 16), (5, 1)], mode=mode, antialias=antialias)
    )
    got = fast.resample_pos_embeds(
        table, [(7, 30), (16, 16), (5, 1)], mode=mode, antialias=antialias
    )
    assert got.dtype == dtype
    assert relative(got, want) <= max(torch.finfo(dtype).eps / 2, 1e-12) + 1e-6 * (
        dtype != torch.float64
    )


def test_linear_in_tokens_and_no_loop_over_images_in_the_backward():
    table, sizes = torch.randn(16, 16, 8, requires_grad=True), [(9, 28)] * 40
    with Largest() as largest:
        out = fast.resample_pos_embeds(table, sizes, mode="bilinear")
    nodes = [out.grad_fn]
    for node in nodes:  # which grows meanwhile
        nodes += [n for n, _ in node.next_functions if n is not None]
    assert largest.elements <= 40 * 252 * 8 and len(nodes) <= 4
