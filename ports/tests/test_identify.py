"""Every convention is told from every other one, in every precision, and nothing else is named."""

import re

import pytest
import torch
from on_the_kit import random_table, resized, tokens_of
from torch.nn.functional import affine_grid, grid_sample
from torch.nn.utils.rnn import pad_sequence

from vit_ports.conventions import Convention, conventions
from vit_ports.identify import DECIMALS, identify_resampling, verdict

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
# Each is compared with all others. Those with one layout of the tokens follow one another.
MORE = ALL[16:160:16] + ALL[163::59]
SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in MORE]
BILINEAR = Convention("bilinear", cubic_coefficient=None)


@pytest.mark.parametrize("convention", [ALL[0], *SLOW], ids=str)
def test_each_is_identified_from_float32_whatever_the_padding_holds(convention):
    table = random_table(3)
    tokens = tokens_of(convention, table, SIZES).float()
    images = tokens.split([t * h * w for t, h, w in SIZES])
    padded = pad_sequence(images, batch_first=True, padding_value=9.0)
    found = identify_resampling(table[None], torch.tensor(SIZES), padded)
    error, best = found[0]
    assert Convention(**best) == convention and error < 1e-6
    errors = [round(error, DECIMALS) for error, _ in found]
    assert errors == sorted(errors)
    assert errors[1] > 1e-4
    assert len(found) == len(ALL)


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("edges", [False, True])
def test_grid_sample_is_identified_and_the_plainest_comes_first(edges, corners, mode, padding):
    size = (9, 20)  # one axis becomes smaller, one larger
    table = random_table(1, size=(16, 16))
    # From edge to edge of the table, or from centre to centre of the outermost cells.
    positions = affine_grid(torch.eye(2, 3)[None], (1, 1, *size), align_corners=edges)
    options = dict(mode=mode, align_corners=corners, padding_mode=padding)
    result = grid_sample(table.permute(2, 0, 1)[None], positions, **options)
    found = identify_resampling(table, size, result[0].permute(1, 2, 0))
    _, best = found[0]
    assert found[0][0] < 1e-5
    # The plainest: both axes are alike, so the table may be transposed, say.
    assert (best["mode"], best["transposed"], best["merge"]) == (mode, None, 1)


TABLE = random_table(5)
RESULT = torch.ones(16, 3)
SHAPES = r"table must be \(H0, W0, C\) and result \(16, C\), channels last; got \("
NOTHING = "nothing can be told of a table that is the same in every cell, sizes that"
WRONG = [
    ("table", TABLE[0], SHAPES),
    ("table", TABLE.permute(2, 0, 1), SHAPES),
    ("table", TABLE[:1, :1].expand(8, 9, 3), NOTHING),
    ("size", (4, 0), "must hold"),
    ("size", (4, 4.5), "must hold"),
    ("result", RESULT.bool(), "result must hold finite numbers"),
    ("size", (8, 9), SHAPES.replace("16", "72")),
    ("result", RESULT.mT[None], SHAPES),
    ("result", RESULT + torch.nan, "result must hold finite numbers"),
    ("result", RESULT * 0, NOTHING),
]


def test_bad_input_is_named():
    good = dict(table=TABLE, size=(4, 4), result=RESULT)
    assert identify_resampling(**good)
    for argument, wrong, why in WRONG:
        with pytest.raises(ValueError, match=why):
            identify_resampling(**{**good, argument: wrong})
    with pytest.raises(ValueError, match=NOTHING):
        identify_resampling(TABLE, (8, 9), torch.ones(72, 3))


# Whether a port is right.


TABLE_OF_16 = random_table(9, channels=24, size=(16, 16))
ASKED = [(1, 4, 6), (1, 12, 8)]


def rounded(tensor, precision):
    return tensor.to(getattr(torch, precision)).float()


def judged(table, result, precision="float32", sizes=ASKED):
    is_equal, lines = verdict(BILINEAR, table, sizes, result.float(), precision)
    return is_equal, "\n".join(lines)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_port_in_half_precision_is_right_if_that_is_said(precision):
    # Neighbouring cells are alike, as in a trained table.
    smooth = resized(TABLE_OF_16[:5, :5], (16, 16), "bicubic") + 3
    for table in (TABLE_OF_16, smooth):
        result = rounded(tokens_of(BILINEAR, table, ASKED), precision)
        is_equal, said = judged(table, result, precision)
        assert is_equal and f", within the rounding of {precision} (" in said
        is_equal, said = judged(table, result)
        assert not is_equal and "not within the rounding of float32 (" in said
        assert "say --precision" in said


def test_an_outlier_of_the_table_hides_nothing():
    table = TABLE_OF_16.clone()
    table[12, 1, 5] = 283
    of_rounded_table = tokens_of(BILINEAR, rounded(table, "bfloat16"), ASKED)
    is_equal, said = judged(table, of_rounded_table)
    assert not is_equal and "say --precision" in said
    assert judged(table, of_rounded_table, "bfloat16")[0]
    assert judged(table, tokens_of(BILINEAR, table, ASKED))[0]


def test_another_convention_that_is_much_nearer_is_right_although_rounding_explains_both():
    table = rounded(TABLE_OF_16 + 100, "bfloat16")
    wrong = BILINEAR._replace(antialias=False, outside="border")
    is_equal, said = judged(table, tokens_of(wrong, table, ASKED), "bfloat16")
    assert not is_equal and "follows another, within the rounding of bfloat16 (" in said
    assert " %  bilinear, no antialiasing\n" in said
    assert "\nthe reference: bilinear, antialiased\n" in said


def test_conventions_that_the_sizes_do_not_tell_apart_are_counted():
    sizes = [(1, 17, 19)]
    is_equal, said = judged(TABLE_OF_16, tokens_of(BILINEAR, TABLE_OF_16, sizes), sizes=sizes)
    assert is_equal and re.search(r"\n\d+ conventions are as near; ", said)
