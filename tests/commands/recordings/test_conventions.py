"""Every convention of the list: what it computes, that it differs from the others, what it is called."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.checks import one_by_one
from timm_naflex_fast.commands.recordings.conventions import Convention, conventions
from timm_naflex_fast.commands.recordings.identify import tokens_of
from timm_naflex_fast.functional import resample_pos_embed, resample_pos_embeds

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
BILINEAR = Convention("bilinear", cubic_coefficient=None)


def random_table(seed, channels=3, size=(8, 9)):
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("n0", [1, 4, 9])
def test_the_formula_is_pytorchs(n0, corners, mode, antialias):
    coefficient = {"bilinear": None, "bicubic": -0.5 if antialias else -0.75}[mode]
    positions = "corners" if corners else "half_pixel"
    outside = "dropped" if antialias else "border"
    convention = Convention(mode, coefficient, antialias, outside, corners, positions)
    table = random_table(0, size=(n0, n0 + 1)).double()
    sizes = [(1, 1, 2), (1, 3, 17), (1, 8, 5), (1, n0, n0 + 1)]
    got = tokens_of(convention, table, sizes)
    how = dict(mode=mode, antialias=antialias, align_corners=corners)
    want = torch.cat(one_by_one(table, sizes, **how))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_without_settings_it_is_pytorchs_antialiased_bicubic():
    table = random_table(0).double()
    sizes = [(1, 5, 12)]
    want = torch.cat(one_by_one(table, sizes, mode="bicubic", antialias=True))
    torch.testing.assert_close(tokens_of(Convention(), table, sizes), want, atol=1e-6, rtol=1e-6)


def test_no_two_conventions_give_the_same_result():
    table = random_table(0).double()
    results = torch.stack([tokens_of(convention, table, SIZES).flatten() for convention in ALL])
    distance = torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf)
    assert distance.min() / table.abs().max() > 1e-4


def test_no_two_conventions_have_the_same_words():
    assert len({convention.words() for convention in ALL}) == len(ALL)


def test_words_are_plain():
    for convention in ALL:
        assert "None" not in convention.words() and "=" not in convention.words()


def test_differences_name_what_the_reference_does_instead():
    port = Convention("bicubic", -0.75, antialias=False, outside="dropped")
    assert port.differences(BILINEAR._replace(merge=2)) == (
        "bicubic, coefficient -0.75 instead of bilinear; no antialiasing instead of antialiased; "
        "taps outside dropped; not tokens in blocks of 2 x 2"
    )
    assert port.differences(port) == "the reference"


@pytest.mark.parametrize(
    ("transposed", "size", "turned"),
    [
        (None, (6, 4), False),
        ("order", (6, 4), True),
        ("size", (4, 6), False),
        ("table", (4, 6), True),
    ],
)
def test_what_transposed_means(transposed, size, turned):
    table = random_table(7).double()
    want = resample_pos_embed(table, size, mode="bilinear")
    if turned:
        want = want.transpose(0, 1)
    got = tokens_of(BILINEAR._replace(transposed=transposed), table, [(1, 6, 4)])
    torch.testing.assert_close(got, want.flatten(0, 1), atol=1e-6, rtol=0)


def test_what_frames_and_blocks_mean():
    table = random_table(8).double()
    sizes = [(2, 6, 12), (1, 12, 6)]
    want = resample_pos_embeds(table, sizes, mode="bilinear", merge=3)
    got = tokens_of(BILINEAR._replace(merge=3), table, sizes)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_asymmetric_position_i_is_i_times_the_scale():
    matrix = torch.from_numpy(
        Convention("bilinear", None, antialias=False, positions="asymmetric").matrix(4, 8)
    )
    assert matrix.argmax(1).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("positions", "mode"), [("asymmetric", "nearest"), ("half_pixel", "nearest-exact")]
)
def test_nearest_is_pytorchs(positions, mode):
    table = random_table(2).double()
    convention = Convention("nearest", None, False, "border", positions=positions)
    want = F.interpolate(table.permute(2, 0, 1)[None], (5, 21), mode=mode)
    got = tokens_of(convention, table, [(1, 5, 21)])
    torch.testing.assert_close(got, want[0].permute(1, 2, 0).flatten(0, 1))


# A table of 4 cells at 0, 1, 2, 3 becomes 2 cells at 0.5 and 2.5, by a filter that reaches 2 cells
# each way: the first has weights 1/8, 3/8, 3/8 and 1/8 at -1, 0, 1 and 2.
@pytest.mark.parametrize(
    ("outside", "first"),
    [
        ("dropped", [3 / 7, 3 / 7, 1 / 7, 0]),
        ("border", [1 / 2, 3 / 8, 1 / 8, 0]),
        ("zeros", [3 / 8, 3 / 8, 1 / 8, 0]),
    ],
)
def test_what_becomes_of_taps_outside_an_antialiased_table(outside, first):
    matrix = torch.from_numpy(BILINEAR._replace(outside=outside).matrix(2, 4))
    expected = torch.tensor([first, first[::-1]], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected)


def onnx_resize(table, size, **options):
    """What ONNX Runtime's Resize makes of a table (H0, W0, C), (h*w, C)."""
    from onnx import TensorProto, helper
    from onnxruntime import InferenceSession

    shape = [1, table.shape[2], *size]
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], antialias=1, **options)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, *table.permute(2, 0, 1).shape])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    sizes = helper.make_tensor("sizes", TensorProto.INT64, [4], shape)
    graph = helper.make_graph([node], "resize", [x], [y], [sizes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = InferenceSession(model.SerializeToString())
    [resized] = session.run(None, {"x": table.permute(2, 0, 1)[None].contiguous().numpy()})
    return torch.from_numpy(resized)[0].permute(1, 2, 0).flatten(0, 1)


@pytest.mark.parametrize(("exclude_outside", "outside"), [(0, "border"), (1, "dropped")])
@pytest.mark.parametrize(("mode", "coefficient"), [("linear", None), ("cubic", -0.5)])
def test_onnx_resize_is_listed(mode, coefficient, exclude_outside, outside):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    options = dict(mode=mode, exclude_outside=exclude_outside)
    if mode == "cubic":
        options["cubic_coeff_a"] = coefficient
    table = random_table(1, size=(16, 12))
    convention = BILINEAR._replace(cubic_coefficient=coefficient, outside=outside)
    if mode == "cubic":
        convention = convention._replace(mode="bicubic")
    got = tokens_of(convention, table.double(), [(1, 5, 17)])
    want = onnx_resize(table, (5, 17), **options).double()
    torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    assert convention in conventions([(1, 5, 17)])
