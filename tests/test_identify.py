"""Every convention of resampling is told from every other one."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import grid_sample
from torch.nn.utils.rnn import pad_sequence

from tests.support.checks import one_by_one, slow
from tests.support.oracles import Largest
from timm_naflex_fast.functional import identify_resampling, resample_pos_embed, resample_pos_embeds
from timm_naflex_fast.identify import DECIMALS, Convention, conventions, describe

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
FIRST_OF_EACH_ROUNDING = ALL[::576]
# Each is compared with all 1728.
MORE = [*ALL[1:36:5], *ALL[36::41], *ALL[217::576]]
BILINEAR = Convention("bilinear", cubic_coefficient=None)


def random_table(seed, channels=3, size=(8, 9)):
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("n0", [1, 4, 9])
def test_the_formula_is_pytorchs(n0, corners, mode, antialias):
    pytorchs = {"bilinear": None, "bicubic": -0.5 if antialias else -0.75}
    convention = Convention(
        mode, antialias, corners, half_pixel=not corners, cubic_coefficient=pytorchs[mode]
    )
    how = dict(mode=mode, antialias=antialias, align_corners=corners)
    table = random_table(0, size=(n0, n0 + 1)).double()
    for h, w in [(1, 2), (3, 17), (8, 5), (n0, n0 + 1)]:
        (want,) = one_by_one(table, [(h, w)], **how)
        got = convention.grid(table, h, w).flatten(0, 1)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_no_two_conventions_give_the_same_result():
    table = random_table(0).double()
    results = torch.stack([convention.tokens(table, SIZES).flatten() for convention in ALL])
    distance = torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf)
    assert distance.min() / table.abs().max() > 1e-4


@pytest.mark.parametrize("convention", [*FIRST_OF_EACH_ROUNDING, *map(slow, MORE)], ids=str)
def test_each_is_identified_from_float32_whatever_the_padding_holds(convention):
    table = random_table(3)
    tokens = convention.tokens(table.double(), SIZES).float()
    images = tokens.split([t * h * w for t, h, w in SIZES])
    padded = pad_sequence(images, batch_first=True, padding_value=9.0)
    found = identify_resampling(table[None], torch.tensor(SIZES), padded)
    error, best = found[0]
    assert Convention(**best) == convention and error < 1e-6
    assert found[1][0] > 1e-4


def sampled_by_torch(table, size, *, edges, **options):
    """A table (H0, W0, C) sampled at (h, w) positions, (h, w, C).

    ``edges``: at coordinates from -1 to 1, else at the centres of cells.
    """
    limits = [1 if edges else 1 - 1 / n for n in size]
    y, x = (torch.linspace(-limit, limit, n) for limit, n in zip(limits, size))
    positions = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None]  # (1, h, w, 2)
    sampled = grid_sample(table.permute(2, 0, 1)[None], positions, **options)  # (1, C, h, w)
    return sampled[0].permute(1, 2, 0)


# Both axes larger, smaller, or one of each.
@pytest.mark.parametrize("size", [(9, 20), (24, 20), (12, 5)])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("transposed", [None, "order"])
def test_grid_sample_is_identified_and_the_plainest_comes_first(
    transposed, edges, corners, mode, padding, size
):
    table = random_table(1, size=(16, 16))
    options = dict(mode=mode, align_corners=corners, padding_mode=padding)
    result = sampled_by_torch(table, size, edges=edges, **options)
    if transposed:
        result = result.transpose(0, 1)
    found = identify_resampling(table, size, result.reshape(-1, 3))
    equal = [Convention(**settings) for error, settings in found if error < 1e-5]
    best = equal[0]
    assert best.mode == mode and best.transposed == transposed and not best.bfloat16
    assert not best.zeros_outside or padding == "zeros"
    plainest = next(one for one in conventions([(1, *size)]) if one in equal)
    assert best == plainest


@pytest.mark.parametrize("transposed", ["size", "table"])
def test_memory_follows_the_numbers_that_are_given(transposed):
    table = random_table(0, 1, (1, 3000)).double()
    with Largest() as largest:
        Convention(transposed=transposed).tokens(table, [(1, 1, 3000)])
    assert 3000 <= largest.elements < 20 * 3000


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
    got = replace(BILINEAR, transposed=transposed).tokens(table, [(1, 6, 4)])
    torch.testing.assert_close(got, want.flatten(0, 1), atol=1e-6, rtol=0)


def test_what_frames_and_blocks_mean():
    table = random_table(8).double()
    sizes = [(2, 6, 12), (1, 12, 6)]
    want = resample_pos_embeds(table, sizes, mode="bilinear", merge=3)
    got = replace(BILINEAR, merge=3).tokens(table, sizes)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_without_half_pixels_position_i_is_i_times_the_scale():
    matrix = replace(BILINEAR, half_pixel=False).matrix(4, 8)
    assert matrix.argmax(1).tolist() == [0, 2, 4, 6]


def test_every_convention_is_tried():
    assert len(ALL) == len(set(ALL)) == 1728  # blocks of 1 and 2 cells
    assert len(list(conventions([(1, 12, 12)]))) == 2 * 1728  # of 1, 2, 3 and 4
    assert len(list(conventions([(1, 7, 5)]))) == 1728 // 2  # of 1


def test_every_convention_is_given_back_by_its_error():
    found = identify_resampling(random_table(9), (7, 5), torch.randn(35, 3))
    assert {Convention(**settings) for _, settings in found} == set(conventions([(1, 7, 5)]))
    errors = [round(error, DECIMALS) for error, _ in found]
    assert errors == sorted(errors)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(cubic_coefficient=-0.75), "with antialiasing, cubic coefficient -0.75"),
        (
            dict(antialias=False, cubic_coefficient=-0.75, drops_outside=True),
            "without antialiasing, taps outside the table dropped",
        ),
        (
            dict(align_corners=True, half_pixel=False, ar_preserving=True, transposed="size"),
            "with antialiasing, aligned corners, aspect-preserving (resized to a square, then cut),"
            " height and width exchanged",
        ),
        (
            dict(half_pixel=False, transposed="order", merge=2, bfloat16="weights"),
            "with antialiasing, positions without half pixels, tokens column by column, "
            "tokens in 2 x 2 blocks, weights rounded to bfloat16",
        ),
        (dict(transposed="table"), "with antialiasing, table transposed"),
    ],
)
def test_a_convention_in_words(settings, words):
    assert describe(Convention(**settings)) == f"bicubic {words}"


GOOD = torch.ones(16, 3)
WRONG = {
    "table": [
        random_table(5)[0],
        random_table(5).to(torch.int64),
        random_table(5) > 0,
        random_table(5).to(torch.complex64),
        random_table(5)[:0],
        random_table(5)[..., :0],
        random_table(5) + torch.nan,
        random_table(5)[:1, :1],  # this and the next two tell nothing
        random_table(5)[:1, :1].expand(8, 9, 3),
        torch.ones(8, 9, 3),
    ],
    "size": [
        (4, 0),
        [[1, 1, 2, 3]],
        4,
        (4.0, 4.0),
        [],
        torch.zeros(0, 2, dtype=torch.int64),
        (True, True),
    ],
    "result": [
        GOOD[:15],
        GOOD[:0],
        GOOD + torch.nan,
        GOOD.to(torch.int64),
        GOOD > 0,
        GOOD + 1j,
        0 * GOOD,
        None,
    ],
}


@pytest.mark.parametrize("argument", WRONG)
def test_bad_input_is_named(argument):
    good = dict(table=random_table(5), size=(4, 4), result=GOOD)
    assert identify_resampling(**good)
    for wrong in WRONG[argument]:
        with pytest.raises(ValueError, match=r"must (be|have|hold|name|differ)"):
            identify_resampling(**{**good, argument: wrong})
