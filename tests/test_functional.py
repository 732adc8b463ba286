"""The plain functions: shapes, dtypes and errors. Their numbers are tested strategy by strategy."""

import warnings
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
STRATEGIES = pytest.mark.parametrize("strategy", STRATEGY_NAMES)


def embedded(table=TABLE, coord=COORD, **options):
    """What ``add_pos_embed_`` adds to zeros."""
    x = torch.zeros(2, 6, 4)
    assert fast.add_pos_embed_(x, table, coord, **options) is x
    return x


def factorized(table_y, table_x, **options):
    x = torch.zeros(2, 6, 4)
    assert fast.add_factorized_pos_embed_(x, table_y, table_x, COORD, **options) is x
    return x


@STRATEGIES
def test_a_leading_1_of_a_table_changes_nothing(strategy):
    want = embedded(strategy=strategy)
    assert want.abs().max() > 0.1
    assert torch.equal(embedded(TABLE[None], strategy=strategy), want)
    want = factorized(LINE, LINE, strategy=strategy)
    assert torch.equal(factorized(LINE[None], LINE[None], strategy=strategy), want)


@STRATEGIES
def test_sizes_in_place_of_coordinates_give_the_same(strategy):
    want = embedded(strategy=strategy)
    for sizes in (SIZES, torch.tensor(SIZES)):
        assert torch.equal(embedded(coord=None, grid_sizes=sizes, strategy=strategy), want)


NAMES = "valid: 'interpolate_cached', 'grid_sample', 'matmul'"
MODES = "valid: 'bilinear', 'bicubic'"
NO_TENSOR = torch.zeros(5, 5, 4).numpy()
NO_SIZES = 2, (2.5, 2), ("a", 1), (0, 2), (2, 2, 2)
NO_STRATEGIES = r"^strategy='stock' is not a strategy; " + NAMES


def complete(function):
    """Arguments of which nothing is wrong."""
    x = torch.zeros(2, 6, 4)
    return {
        fast.add_pos_embed_: dict(x=x, table=TABLE, patch_coord=COORD),
        fast.add_factorized_pos_embed_: dict(x=x, table_y=LINE, table_x=LINE, patch_coord=COORD),
        fast.resample_pos_embed: dict(table=TABLE, size=(2, 3)),
        fast.resample_patch_kernel: dict(weight=torch.zeros(2, 3, 4, 4), size=(2, 3)),
        fast.resize_matrix: dict(n=3, n0=4),
        fast.resample_pos_embeds: dict(table=TABLE, grid_sizes=[(4, 4), (2, 6)], mode="bilinear"),
    }[function]


def is_refused(function, message, **change):
    arguments = complete(function) | change
    with pytest.raises(ValueError, match=message):
        function(**arguments)
    # And nothing has changed.
    if "x" in arguments and "x" not in change:
        assert not arguments["x"].any()


add = partial(is_refused, fast.add_pos_embed_)
add_factorized = partial(is_refused, fast.add_factorized_pos_embed_)
resample = partial(is_refused, fast.resample_pos_embeds)


def test_a_wrong_table_is_named():
    message = r"^table must have shape \(H0, W0, C\) or \(1, H0, W0, C\); got "
    for table in (torch.zeros(2, 5, 5, 4), LINE):
        add(message, table=table)
        resample(message, table=table)
    add("table must be a tensor of real numbers", table=NO_TENSOR)
    add_factorized("table_x must have shape", table_x=torch.zeros(4))
    is_refused(fast.resample_pos_embed, r"shape \(H0, W0, C\)", table=LINE)
    is_refused(fast.resample_patch_kernel, r"\(O, I, H0, W0\)", weight=TABLE)
    is_refused(fast.resample_patch_kernel, "weight must be a tensor of real", weight=None)


FLOAT8 = "torch.float8_e5m2"
# Each tensor that a function takes, and whether it may have the dtype float8.
ARGUMENTS = [
    (fast.add_pos_embed_, "table", TABLE, False),
    (fast.resample_pos_embeds, "table", TABLE, False),
    (fast.resample_pos_embed, "table", TABLE, False),
    (fast.add_factorized_pos_embed_, "table_x", LINE, False),
    (fast.add_pos_embed_, "x", torch.ones(2, 6, 4), False),
    (fast.add_pos_embed_, "patch_coord", COORD, True),  # whole numbers, like those of every float
    (fast.resample_pos_embeds, "grid_sizes", torch.tensor(SIZES), True),
    (fast.resample_patch_kernel, "weight", torch.ones(2, 3, 4, 4), True),  # as in timm
]


def kinds(tensor):
    """The numbers of a tensor in each form that PyTorch has besides a plain one, and its name."""
    floats = tensor.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, and what will go
        return {
            "torch.sparse_coo": floats.to_sparse(),
            "torch.sparse_csr": floats.flatten(1).to_sparse_csr(),
            "torch.qint8": torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([floats, floats]),
            "torch._mkldnn": floats.to_mkldnn(),
            "torch.complex64": floats.to(torch.complex64),
            FLOAT8: floats.to(torch.float8_e5m2),
        }


@pytest.mark.parametrize(("function", "name", "right", "takes_float8"), ARGUMENTS)
def test_every_other_kind_of_tensor_is_named(function, name, right, takes_float8):
    wrong = kinds(right)
    if takes_float8:
        del wrong[FLOAT8]
    if "table" in name:
        wrong |= {"torch.bool": right.bool(), "int64": right.long()}
    for kind, value in wrong.items():
        is_refused(function, f"^{name} must be .*{kind}", **{name: value})


def test_a_table_elsewhere_than_the_tokens_is_named():
    message = "^table must be on the device of x, cpu; got meta"
    add(message, table=TABLE.to("meta"))
    add_factorized("^table_x must be on the device of x", table_x=LINE.to("meta"))


@pytest.mark.parametrize(
    "function",
    dict.fromkeys(function for function, *_ in ARGUMENTS),
    ids=lambda function: function.__name__,
)
def test_on_the_device_meta_a_result_has_its_shape_and_dtype(function):
    want = function(**complete(function))
    arguments = complete(function)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to("meta")
    got = function(**arguments)
    assert got.is_meta
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_wrong_tokens_are_named():
    add("as wide as the table", x=torch.zeros(2, 6, 3))
    add("floating point", x=torch.zeros(2, 6, 4, dtype=torch.long))


def test_wrong_coordinates_are_named():
    add(r"patch_coord must hold .*; got \(2, 5, 2\)", patch_coord=COORD[:, :5])
    add("got list", patch_coord=[[0, 0]])
    for cell in ((-1, 0), (0, -1)):
        add("negative", patch_coord=COORD * 0 + torch.tensor(cell))
    add("either patch_coord or grid_sizes", patch_coord=None)
    add("either patch_coord or grid_sizes", grid_sizes=SIZES)


def test_wrong_sizes_are_named():
    for sizes in ([(1, 2, 3)] * 2, [(2, 3)]):
        message = r"hold \(h, w\) for each of the 2 samples, shape \(2, 2\)"
        add(message, patch_coord=None, grid_sizes=sizes)
    add("image 1 has 8 tokens", patch_coord=None, grid_sizes=[(2, 3), (4, 2)])
    resample("integers of at least 1", grid_sizes=[(4, 0)])
    resample(r"shape \(B, 2\) or \(B, 3\)", grid_sizes=torch.zeros(2))
    for size in NO_SIZES:
        is_refused(fast.resample_pos_embed, "^size must be two integers", size=size)
        is_refused(fast.resample_patch_kernel, "^size must be two integers", size=size)
    is_refused(fast.resize_matrix, "^size must be two integers", n=0)


def test_wrong_words_are_named_with_those_that_are_valid():
    for function in (add, add_factorized, resample):
        function(NO_STRATEGIES, strategy="stock")
    add(MODES, mode="nearest")
    resample(MODES, mode="nearest")
    is_refused(fast.resample_pos_embed, MODES, mode="area")
    is_refused(fast.resample_patch_kernel, MODES, mode="nearest")
    is_refused(fast.resize_matrix, MODES, mode="nearest")
    resample("'last' is not valid; valid: 'zeros', 'first'", padding="last")


def test_wrong_lengths_and_merges_are_named():
    resample("image 0 has 16 tokens, length is 15", length=15)
    resample("merge must be an integer of at least 1", merge=0)
    message = "merge must divide every height and width; 3 does not divide 3 x 4"
    resample(message, grid_sizes=[(3, 4)], merge=3)


def test_the_mode_of_packed_embeddings_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        fast.resample_pos_embeds(TABLE, [(4, 4)])


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
    embed = partial(fast.resample_pos_embeds, table, strategy=strategy, **options)

    got = embed(torch.tensor(grids))

    assert got.shape == want.shape
    assert got.dtype == table.dtype
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
        got = fast.resample_pos_embeds(table, sizes, mode=mode, antialias=antialias)
        assert got.dtype == dtype
        assert relative(got, want) <= rounding


def test_linear_in_tokens_and_no_loop_over_images_in_the_backward():
    table = torch.randn(16, 16, 8, requires_grad=True)
    with Largest() as largest:
        out = fast.resample_pos_embeds(table, [(9, 28)] * 40, mode="bilinear")
    nodes = [out.grad_fn]
    for node in nodes:  # which grows meanwhile
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert largest.elements <= 40 * 252 * 8
    assert len(nodes) <= 4
