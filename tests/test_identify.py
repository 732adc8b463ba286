"""Every convention of resampling is told from every other one."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import grid_sample
from torch.nn.utils.rnn import pad_sequence

from tests.support.checks import one_by_one
from tests.support.oracles import Largest
from timm_naflex_fast.functional import identify_resampling, resample_pos_embed, resample_pos_embeds
from timm_naflex_fast.identify import DECIMALS, Convention, conventions, describe

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
# Three by default: each is compared with all 1728.
SLOW = [
    pytest.param(c, marks=pytest.mark.slow) for c in (*ALL[1:36:5], *ALL[36::41], *ALL[217::576])
]


def random_table(seed, channels=3, size=(8, 9)):
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("n0", [1, 4, 9])
def test_the_formula_is_pytorchs(n0, corners, mode, antialias):
    coefficient = None if mode == "bilinear" else -0.5 if antialias else -0.75
    convention = Convention(mode, antialias, corners, not corners, cubic_coefficient=coefficient)
    table = random_table(0, size=(n0, n0 + 1)).double()
    for h, w in [(1, 2), (3, 17), (8, 5), (n0, n0 + 1)]:
        (theirs,) = one_by_one(
            table, [(h, w)], mode=mode, antialias=antialias, align_corners=corners
        )
        torch.testing.assert_close(
            convention.grid(table, h, w).flatten(0, 1), theirs, atol=1e-6, rtol=1e-6
        )


def test_no_two_conventions_give_the_same_result():
    table = random_table(0).double()
    results = torch.stack([convention.tokens(table, SIZES).flatten() for convention in ALL])
    distance = (
        torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf) / table.abs().max()
    )
    assert distance.min() > 1e-4


@pytest.mark.parametrize("convention", [*ALL[::576], *SLOW], ids=str)
def test_each_is_identified_from_float32_whatever_the_padding_holds(convention):
    table = random_table(3)
    images = (
        convention.tokens(table.double(), SIZES).float().split([t * h * w for t, h, w in SIZES])
    )
    result = pad_sequence(images, batch_first=True, padding_value=9.0)
    (error, best), (second, _), *_ = identify_resampling(table[None], torch.tensor(SIZES), result)
    assert Convention(**best) == convention and error < 1e-6 and second > 1e-4


@pytest.mark.parametrize(
    "size", [(9, 20), (24, 20), (12, 5)]
)  # both axes larger, smaller, or one of each
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("corners", "edges"), [(False, False), (True, True), (True, False), (False, True)]
)
def test_grid_sample_is_identified_and_the_plainest_comes_first(
    corners, edges, mode, padding, size
):
    """``edges``: coordinates from -1 to 1, else the centres of cells; ``corners``:
    align_corners."""
    y, x = (
        torch.linspace(-1 + inner, 1 - inner, n) for n in size for inner in [0 if edges else 1 / n]
    )
    table, xy = (
        random_table(1, size=(16, 16)),
        torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None],
    )
    options = dict(mode=mode, align_corners=corners, padding_mode=padding)
    sampled = grid_sample(table.permute(2, 0, 1)[None], xy, **options)[0].permute(
        1, 2, 0
    )  # (h, w, C)
    for transposed, result in (None, sampled), ("order", sampled.transpose(0, 1)):
        (error, best), *others = identify_resampling(table, size, result.reshape(-1, 3))
        found = Convention(**best)
        assert (
            error < 1e-5
            and found.mode == mode
            and found.transposed == transposed
            and not found.bfloat16
        )
        same = [Convention(**other) for near, other in others if near < 1e-5]
        plain = [
            convention for convention in conventions([(1, *size)]) if convention in (found, *same)
        ]
        assert plain[0] == found and found.zeros_outside <= (padding == "zeros")


@pytest.mark.parametrize("transposed", [None, "size", "table"])
def test_memory_follows_the_numbers_that_are_given(transposed):
    with Largest() as largest:
        Convention(transposed=transposed).tokens(
            random_table(0, 1, (1, 3000)).double(), [(1, 1, 3000)]
        )
    assert 3000 <= largest.elements < 20 * 3000


@pytest.mark.parametrize("transposed", [None, "order", "size", "table"])
def test_what_transposed_means(transposed):
    table, h, w = random_table(7).double(), 6, 4
    grid = resample_pos_embed(
        table, (w, h) if transposed in ("size", "table") else (h, w), mode="bilinear"
    )
    want = (grid.transpose(0, 1) if transposed in ("order", "table") else grid).flatten(0, 1)
    got = Convention("bilinear", cubic_coefficient=None, transposed=transposed).tokens(
        table, [(1, h, w)]
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_what_frames_blocks_and_half_pixels_mean():
    table, sizes = random_table(8).double(), [(2, 6, 12), (1, 12, 6)]
    convention = Convention("bilinear", cubic_coefficient=None, merge=3)
    want = resample_pos_embeds(table, sizes, mode="bilinear", merge=3)
    torch.testing.assert_close(convention.tokens(table, sizes), want, atol=1e-6, rtol=0)
    matrix = replace(convention, half_pixel=False).matrix(4, 8)
    assert matrix.argmax(1).tolist() == [0, 2, 4, 6]  # position i is i times the scale


def test_every_convention_is_tried_and_given_back():
    assert len(list(conventions([(1, 12, 12)]))) == 2 * 1728  # blocks of 1, 2, 3 and 4 cells
    assert len(list(conventions([(1, 7, 5)]))) == 1728 // 2 and len(ALL) == 1728
    found = identify_resampling(random_table(9), (7, 5), torch.randn(35, 3))
    assert {Convention(**settings) for _, settings in found} == set(conventions([(1, 7, 5)]))
    errors = [round(error, DECIMALS) for error, _ in found[10:]]
    assert errors == sorted(errors)


def test_a_convention_in_words():
    plain = Convention(antialias=False, cubic_coefficient=-0.75, drops_outside=True)
    squares = Convention(
        align_corners=True, half_pixel=False, ar_preserving=True, transposed="size"
    )
    columns = Convention(half_pixel=False, transposed="order", merge=2, bfloat16="weights")
    for convention, said in {
        Convention(cubic_coefficient=-0.75): "with antialiasing, cubic coefficient -0.75",
        plain: "without antialiasing, taps outside the table dropped",
        squares: "with antialiasing, aligned corners, aspect-preserving (resized to a square, then cut), "
        "height and width exchanged",
        columns: "with antialiasing, positions without half pixels, tokens column by column, tokens in 2 x 2 blocks, "
        "weights rounded to bfloat16",
        Convention(transposed="table"): "with antialiasing, table transposed",
    }.items():
        assert describe(convention) == f"bicubic {said}"


def test_bad_input_is_named():
    table, size, result = random_table(5), (4, 4), torch.zeros(16, 3)
    wrong_tables = (
        table[0],
        table.to(torch.int64),
        table > 0,
        table.to(torch.complex64),
        table[:0],
        table[..., :0],
    )
    wrong_tables += (
        table[:1, :1],
        table[:1, :1].expand(8, 9, 3),
        torch.ones(8, 9, 3),
    )  # these tell nothing
    wrong_sizes = (
        (4, 0),
        [[1, 1, 2, 3]],
        4,
        (4.0, 4.0),
        [],
        torch.zeros(0, 2, dtype=torch.int64),
        (True, True),
    )
    whole = torch.ones(16, 3, dtype=torch.int64)
    wrong_results = (
        torch.ones(15, 3),
        result + torch.nan,
        whole,
        whole > 0,
        whole + 1j,
        result,
        None,
        result[:0],
    )
    for place, wrongs in enumerate((wrong_tables, wrong_sizes, wrong_results)):
        for wrong in wrongs:
            arguments = [table, size, torch.ones(16, 3)]
            arguments[place] = wrong
            with pytest.raises(ValueError, match=r"must (be|have|hold|name|differ)"):
                identify_resampling(*arguments)
