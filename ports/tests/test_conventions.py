"""Every convention of the list: what it computes, that it differs from the others, what it is called."""

import pytest
import torch
import torch.nn.functional as F
from on_the_kit import in_blocks, random_table, resized, tokens_of

from vit_ports.conventions import Convention, conventions

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
BILINEAR = Convention("bilinear", cubic_coefficient=None)


# What F.interpolate computes: mode, coefficient, antialias, outside, and its own mode.
PYTORCH = [
    ("bilinear", None, True, "dropped", "bilinear"),
    ("bilinear", None, False, "border", "bilinear"),
    ("bicubic", -0.5, True, "dropped", "bicubic"),
    ("bicubic", -0.75, False, "border", "bicubic"),
    ("nearest", None, False, "border", "nearest-exact"),
    ("nearest", None, False, "border", "nearest"),
]


@pytest.mark.parametrize("positions", ["half_pixel", "corners", "scale_factor"])
@pytest.mark.parametrize("case", PYTORCH, ids=str)
@pytest.mark.parametrize("n0", [1, 4, 9])
def test_the_formula_is_pytorchs(n0, case, positions):
    *settings, mode = case
    is_nearest = settings[0] == "nearest"
    if (positions != "half_pixel" and is_nearest) or (positions == "scale_factor" and settings[2]):
        pytest.skip("PyTorch has no such resize")
    corners = positions == "corners"
    options = {} if is_nearest else dict(align_corners=corners, antialias=settings[2])
    if mode == "nearest":
        positions = "asymmetric"
    convention = Convention(*settings, corners, positions)
    table = random_table(0, size=(n0, n0 + 1)).double()
    for h, w in ((1, 2), (3, 17), (8, 5), (n0, n0 + 1)):
        options["size"] = (h, w)
        if positions == "scale_factor":
            options.update(size=None, scale_factor=((h + 0.1) / n0, (w + 0.1) / (n0 + 1)))
        want = F.interpolate(table.permute(2, 0, 1)[None], mode=mode, **options)
        got = tokens_of(convention, table, [(1, h, w)])
        torch.testing.assert_close(got, want[0].flatten(1).T, atol=1e-6, rtol=1e-6)


def test_no_two_conventions_give_the_same_result_or_have_the_same_words():
    table = random_table(0).double()
    results = [tokens_of(convention, table, SIZES).flatten() for convention in ALL]
    stacked = torch.stack(results)
    distance = torch.cdist(stacked, stacked, p=float("inf"))
    distance.fill_diagonal_(torch.inf)
    assert distance.min() / table.abs().max() > 1e-4
    words = {convention.words() for convention in ALL}
    assert len(words) == len(ALL)
    assert not any("None" in one for one in words)


@pytest.mark.parametrize(
    ("transposed", "size", "turned"),
    [("order", (6, 4), True), ("size", (4, 6), False), ("table", (4, 6), True)],
)
def test_what_transposed_means(transposed, size, turned):
    table = random_table(7).double()
    want = resized(table, size)
    if turned:
        want = want.transpose(0, 1)
    got = tokens_of(BILINEAR._replace(transposed=transposed), table, [(1, 6, 4)])
    torch.testing.assert_close(got, want.flatten(0, 1), atol=1e-6, rtol=0)


def test_what_frames_and_blocks_mean():
    table = random_table(8).double()
    sizes = [(2, 6, 12), (1, 12, 6)]
    first = in_blocks(resized(table, (6, 12)), 3)
    last = in_blocks(resized(table, (12, 6)), 3)
    got = tokens_of(BILINEAR._replace(merge=3), table, sizes)
    torch.testing.assert_close(got, torch.cat([first, first, last]), atol=1e-6, rtol=0)


# A table of 4 cells at 0, 1, 2, 3 becomes 2 cells at 0.5 and 2.5, by a filter that reaches 2 cells
# each way: the first has weights 1/8, 3/8, 3/8 and 1/8 at -1, 0, 1 and 2.
@pytest.mark.parametrize(
    ("outside", "first"),
    [
        ("border", [1 / 2, 3 / 8, 1 / 8, 0]),
        ("zeros", [3 / 8, 3 / 8, 1 / 8, 0]),
    ],
)
def test_what_becomes_of_taps_outside_an_antialiased_table(outside, first):
    # Of a column of cells, each of which has a channel of its own, the tokens are the matrix.
    column = torch.eye(4)[:, None]
    matrix = tokens_of(BILINEAR._replace(outside=outside), column, [(1, 2, 1)])
    expected = torch.tensor([first, first[::-1]], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected)


def test_area_shares_a_cell_that_two_cover():
    table = torch.tensor([3.0, 6.0, 9.0]).reshape(3, 1, 1)
    found = tokens_of(Convention("area", None), table, [(1, 2, 1)])
    assert found.flatten().tolist() == pytest.approx([4, 8])  # (3 + 6 / 2) / 1.5, as OpenCV
