"""Every convention of resampling is told from every other one."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.support.checks import one_by_one, slow
from timm_naflex_fast.functional import identify_resampling, resample_pos_embed, resample_pos_embeds
from timm_naflex_fast.identify import TIE, Convention, conventions, words

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)


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
        (theirs,) = one_by_one(table, [(h, w)], mode=mode, antialias=antialias, align_corners=corners)
        torch.testing.assert_close(convention.grid(table, h, w).flatten(0, 1), theirs, atol=1e-6, rtol=1e-6)


ALL = list(conventions(SIZES))


def test_no_two_conventions_give_the_same_result():
    table = random_table(0).double()
    results = torch.stack([convention.tokens(table, SIZES).flatten() for convention in ALL])
    distance = torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf) / table.abs().max()
    assert distance.min() > 1e-4


# Three by default: each is compared with all 768.
@pytest.mark.parametrize("convention", [*ALL[::300], *map(slow, (*ALL[1:24:5], *ALL[24::41]))], ids=str)
def test_each_is_identified_from_float32_whatever_the_padding_holds(convention):
    table = random_table(3)
    images = convention.tokens(table.double(), SIZES).float().split([t * h * w for t, h, w in SIZES])
    result = pad_sequence(images, batch_first=True, padding_value=9.0)
    (error, best), (second, _), *_ = identify_resampling(table[None], torch.tensor(SIZES), result)
    assert Convention(**best) == convention and error < 1e-6 and second > 1e-4


def test_what_transposed_frames_blocks_and_half_pixels_mean():
    table, (h, w), bilinear = random_table(7).double(), (6, 4), Convention("bilinear", cubic_coefficient=None)
    for transposed in (None, "order", "size", "table"):
        grid = resample_pos_embed(table, (w, h) if transposed in ("size", "table") else (h, w), mode="bilinear")
        want = (grid.transpose(0, 1) if transposed in ("order", "table") else grid).flatten(0, 1)
        got = replace(bilinear, transposed=transposed).tokens(table, [(1, h, w)])
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    sizes = [(2, 6, 12), (1, 12, 6)]
    want = resample_pos_embeds(table, sizes, mode="bilinear", merge=3)
    torch.testing.assert_close(replace(bilinear, merge=3).tokens(table, sizes), want, atol=1e-6, rtol=0)
    matrix = replace(bilinear, half_pixel=False).matrix(4, 8, 4)
    assert matrix.argmax(1).tolist() == [0, 2, 4, 6]  # position i is i times the scale


def test_every_convention_is_tried_and_given_back():
    assert len(list(conventions([(1, 12, 12)]))) == 2 * 768  # blocks of 1, 2, 3 and 4 cells
    assert len(list(conventions([(1, 7, 5)]))) == 768 // 2
    assert len(ALL) == 768
    found = identify_resampling(random_table(9), (7, 5), torch.randn(35, 3))
    assert {Convention(**settings) for _, settings in found} == set(conventions([(1, 7, 5)]))
    errors = [round(error, TIE) for error, _ in found[10:]]
    assert errors == sorted(errors)


def test_a_convention_in_words():
    squares = Convention(align_corners=True, half_pixel=False, ar_preserving=True, transposed="size")
    columns = Convention(half_pixel=False, transposed="order", merge=2, bfloat16="table")
    for convention, said in {
        Convention(transposed="table", cubic_coefficient=-0.75): "cubic coefficient -0.75, table transposed",
        Convention(cubic_coefficient=-0.5, drops_border=True): "taps outside the table dropped",
        squares: "aligned corners, aspect-preserving (resized to a square, then cut), height and width exchanged",
        columns: "positions without half pixels, tokens column by column, tokens in 2 x 2 blocks, "
        "table rounded to bfloat16",
    }.items():
        assert words(convention) == f"bicubic with antialiasing, {said}"
    assert words(Convention(antialias=False, cubic_coefficient=-0.75)) == "bicubic without antialiasing"


def test_bad_input_is_named():
    table, size, result = random_table(5), (4, 4), torch.zeros(16, 3)
    wrong_tables = (table[0], table.to(torch.int64), table > 0, table.to(torch.complex64), table[:0], table[..., :0])
    wrong_tables += (table[:1, :1], table[:1, :1].expand(8, 9, 3), torch.ones(8, 9, 3))  # these tell nothing
    wrong_sizes = ((4, 0), [[1, 1, 2, 3]], 4, (4.0, 4.0), [], torch.zeros(0, 2, dtype=torch.int64), (True, True))
    whole = torch.ones(16, 3, dtype=torch.int64)
    wrong_results = (torch.ones(15, 3), result + torch.nan, whole, whole > 0, whole + 1j, result, None, result[:0])
    for place, wrongs in enumerate((wrong_tables, wrong_sizes, wrong_results)):
        for wrong in wrongs:
            arguments = [table, size, torch.ones(16, 3)]
            arguments[place] = wrong
            with pytest.raises(ValueError, match=r"must (be|have|hold|name|differ)"):
                identify_resampling(*arguments)
