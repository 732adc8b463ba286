"""The plain functions: shapes, dtypes and errors. Their numbers are tested strategy by strategy."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checks import one_by_one
from tests.support.oracles import Largest, relative, row_major
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES

SIZES = [(2, 3), (3, 2)]
COORD = row_major(SIZES)
TABLE = torch.randn(5, 5, 4)
LINE = torch.randn(5, 4)
KERNEL = torch.ones(2, 3, 4, 4)


def complete(function):
    """Arguments of which nothing is wrong."""
    x = torch.zeros(2, 6, 4)
    return {
        fast.add_pos_embed_: dict(x=x, table=TABLE, patch_coord=COORD),
        fast.add_factorized_pos_embed_: dict(x=x, table_y=LINE, table_x=LINE, patch_coord=COORD),
        fast.resample_pos_embed: dict(table=TABLE, size=(2, 3)),
        fast.resample_patch_kernel: dict(weight=KERNEL, size=(2, 3)),
        fast.resize_matrix: dict(n=3, n0=4),
        fast.resample_pos_embeds: dict(table=TABLE, grid_sizes=[(4, 4), (2, 6)], mode="bilinear"),
    }[function]


def result(function, **change):
    return function(**complete(function) | change)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_leading_1_of_a_table_and_sizes_in_place_of_coordinates_change_nothing(strategy):
    learned = partial(result, fast.add_pos_embed_, strategy=strategy)
    exact = "matmul" if strategy == "grid_sample" else strategy
    factorized = partial(result, fast.add_factorized_pos_embed_, strategy=exact)
    want = learned()
    assert want.abs().max() > 0.1
    assert torch.equal(learned(table=TABLE[None]), want)
    assert torch.equal(factorized(table_y=LINE[None], table_x=LINE[None]), factorized())
    for sizes in (SIZES, torch.tensor(SIZES)):
        assert torch.equal(learned(patch_coord=None, grid_sizes=sizes), want)


def test_the_mode_of_packed_embeddings_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        fast.resample_pos_embeds(TABLE, [(4, 4)])


SHAPE = r"^table must have shape \(H0, W0, C\) or \(1, H0, W0, C\); got "
NO_STRATEGY = r"^'stock' is not valid for strategy; valid: 'matmul', 'interpolate_cached'"
MODES = "valid: 'bilinear', 'bicubic'"
EITHER = "either patch_coord or grid_sizes"
FOR_EACH = r"hold \(h, w\) for each of the 2 samples, shape \(2, 2\)"
NO_SIZE = "^size must be two integers"
META = "must be on the device of x, cpu; got meta"
add = fast.add_pos_embed_
add_factorized = fast.add_factorized_pos_embed_
embeds = fast.resample_pos_embeds
# A function, what its error says, and the arguments that are wrong.
WRONG = [
    (add, SHAPE, dict(table=torch.zeros(2, 5, 5, 4))),
    (add, SHAPE, dict(table=LINE)),
    (embeds, SHAPE, dict(table=LINE)),
    (add, "table must be a tensor of real numbers", dict(table=TABLE.numpy())),
    (add_factorized, "table_x must have shape", dict(table_x=torch.zeros(4))),
    (fast.resample_pos_embed, r"shape \(H0, W0, C\)", dict(table=LINE)),
    (fast.resample_patch_kernel, r"\(O, I, H0, W0\)", dict(weight=TABLE)),
    (fast.resample_patch_kernel, "weight must be a tensor of real", dict(weight=None)),
    (add, f"^table {META}", dict(table=TABLE.to("meta"))),
    (add_factorized, f"^table_x {META}", dict(table_x=LINE.to("meta"))),
    (add, "as wide as the table", dict(x=torch.zeros(2, 6, 3))),
    (add, "floating point", dict(x=torch.zeros(2, 6, 4, dtype=torch.long))),
    (add, r"patch_coord must hold .*; got \(2, 5, 2\)", dict(patch_coord=COORD[:, :5])),
    (add, "got list", dict(patch_coord=[[0, 0]])),
    (add, EITHER, dict(patch_coord=None)),
    (add, EITHER, dict(grid_sizes=SIZES)),
    (add, FOR_EACH, dict(patch_coord=None, grid_sizes=[(1, 2, 3)] * 2)),
    (add, FOR_EACH, dict(patch_coord=None, grid_sizes=[(2, 3)])),
    (add, "at most length=6 tokens; got", dict(patch_coord=None, grid_sizes=[(2, 3), (4, 2)])),
    (embeds, "integers of at least 1", dict(grid_sizes=[(4, 0)])),
    (embeds, r"shape \(B, 2\) or \(B, 3\)", dict(grid_sizes=torch.zeros(2))),
    (fast.resize_matrix, NO_SIZE, dict(n=0)),
    (add, MODES, dict(mode="nearest")),
    (embeds, MODES, dict(mode="nearest")),
    (fast.resample_pos_embed, MODES, dict(mode="area")),
    (fast.resample_patch_kernel, MODES, dict(mode="nearest")),
    (fast.resize_matrix, MODES, dict(mode="nearest")),
    (embeds, "'last' is not valid for padding; valid: 'zeros', 'first'", dict(padding="last")),
    (embeds, "at most length=15 tokens; got", dict(length=15)),
    (embeds, "merge must be an integer of at least 1", dict(merge=0)),
    (embeds, "multiples of merge=3", dict(grid_sizes=[(3, 4)], merge=3)),
]
for function in (add, add_factorized, embeds):
    WRONG.append((function, NO_STRATEGY, dict(strategy="stock")))
for size in (2, (2.5, 2), ("a", 1), (0, 2), (2, 2, 2)):
    WRONG.append((fast.resample_pos_embed, NO_SIZE, dict(size=size)))
    WRONG.append((fast.resample_patch_kernel, NO_SIZE, dict(size=size)))


def check_error(function, message, change):
    """The error names what is wrong, and nothing has changed."""
    arguments = complete(function) | change
    with pytest.raises(ValueError, match=message):
        function(**arguments)
    if "x" in arguments and "x" not in change:
        assert not arguments["x"].any()


@pytest.mark.parametrize(("function", "message", "change"), WRONG)
def test_what_is_wrong_is_named(function, message, change):
    check_error(function, message, change)


FLOAT8 = "torch.float8_e5m2"
# Each tensor that a function takes, and whether it may have the dtype float8.
ARGUMENTS = [
    (add, "table", TABLE, False),
    (embeds, "table", TABLE, False),
    (fast.resample_pos_embed, "table", TABLE, False),
    (add_factorized, "table_x", LINE, False),
    (add, "x", torch.ones(2, 6, 4), False),
    (add, "patch_coord", COORD, True),  # whole numbers, like those of every float
    (embeds, "grid_sizes", torch.tensor(SIZES), True),
    (fast.resample_patch_kernel, "weight", KERNEL, True),  # as in timm
]


@pytest.mark.filterwarnings("ignore")  # prototypes, and what will go
@pytest.mark.parametrize(("function", "name", "right", "takes_float8"), ARGUMENTS)
def test_every_other_kind_of_tensor_is_named(function, name, right, takes_float8):
    floats = right.float()
    wrong = {
        "torch.sparse_coo": floats.to_sparse(),
        "torch.sparse_csr": floats.flatten(1).to_sparse_csr(),
        "torch.qint8": torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([floats, floats]),
        "torch._mkldnn": floats.to_mkldnn(),
        "torch.complex64": floats.to(torch.complex64),
        FLOAT8: floats.to(torch.float8_e5m2),
    }
    if takes_float8:
        del wrong[FLOAT8]
    if "table" in name:
        wrong |= {"torch.bool": right.bool(), "int64": right.long()}
    for kind, value in wrong.items():
        check_error(function, f"^{name} must be .*{kind}", {name: value})


@pytest.mark.parametrize(
    "function", dict.fromkeys(function for function, *_ in ARGUMENTS), ids=lambda f: f.__name__
)
def test_on_the_device_meta_a_result_has_its_shape_and_dtype(function):
    want = result(function)
    arguments = complete(function)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to("meta")
    got = function(**arguments)
    assert got.is_meta
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


few = st.integers(1, 3)
sides = st.integers(1, 12)
frames = st.lists(st.tuples(few, sides, sides), min_size=1, max_size=5)
how = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["bilinear", "bicubic"]),
        "antialias": st.booleans(),
        "align_corners": st.booleans(),
        "ar_preserving": st.booleans(),
        "merge": few,
    }
)


def padded(images, length, padding):
    """Embeddings of images as one batch (B, N, C), the rest zeros or the first cell."""
    rows = []
    for image in images:
        rest = image[:1].expand(length - len(image), -1)
        rows.append(torch.cat([image, rest if padding == "first" else 0 * rest]))
    return torch.stack(rows)


@pytest.mark.parametrize("padding", [None, "zeros", "first"])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@given(st.tuples(sides, sides), frames, how)
def test_equals_interpolate_with_gradients(padding, strategy, size, grids, how):
    merge = how["merge"]
    grids = [(t, h * merge, w * merge) for t, h, w in grids]
    table = torch.randn(*size, 3, requires_grad=True)
    images = one_by_one(table, grids, dtype=torch.float32, **how)
    if padding is None:
        want = torch.cat(images)
        options = how
    else:
        length = max(map(len, images)) + 2
        want = padded(images, length, padding)
        options = how | {"length": length, "padding": padding}
    weight = torch.randn_like(want)
    embed = partial(embeds, table, strategy=strategy, **options)

    got = embed(torch.tensor(grids))

    assert (got.shape, got.dtype) == (want.shape, table.dtype)
    rounding = 2e-6 * max(1.0, table.abs().max().item()) if strategy == "matmul" else 0
    assert (got - want).abs().max() <= rounding
    (gradient,) = torch.autograd.grad((got * weight).sum(), table)
    (want_gradient,) = torch.autograd.grad((want * weight).sum(), table)
    assert relative(gradient, want_gradient) <= 1e-5
    with torch.no_grad():
        for _ in range(3):  # kept tables too
            assert (embed(grids) - got).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computed_in_float32_at_least_and_cast_once(dtype):
    sizes = [(7, 30), (16, 16), (5, 1)]
    table = torch.randn(1, 16, 16, 64, dtype=dtype)
    rounding = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps / 2 + 1e-6
    for mode, antialias in product(["bilinear", "bicubic"], [True, False]):
        want = torch.cat(one_by_one(table[0], sizes, mode=mode, antialias=antialias))
        got = embeds(table, sizes, mode=mode, antialias=antialias)
        assert got.dtype == dtype
        assert relative(got, want) <= rounding


def test_no_images_and_no_channels():
    assert embeds(TABLE, [], mode="bicubic").shape == (0, 4)
    for sizes, length in product([[], torch.zeros(0, 2, dtype=torch.int64)], [0, 5]):
        assert embeds(TABLE, sizes, mode="bicubic", length=length).shape == (0, length, 4)
    assert add(torch.zeros(2, 6, 0), TABLE[..., :0], COORD).shape == (2, 6, 0)


def test_linear_in_tokens_and_no_loop_over_images_in_the_backward():
    table = torch.randn(16, 16, 8, requires_grad=True)
    with Largest() as largest:
        out = embeds(table, [(9, 28)] * 40, mode="bilinear")
    nodes = [out.grad_fn]
    for node in nodes:  # which grows meanwhile
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert largest.elements <= 40 * 252 * 8
    assert len(nodes) <= 4
