"""Every convention is told from every other one, in every precision, and nothing else is named."""

import re

import pytest
import torch
from torch.nn.functional import affine_grid, grid_sample
from torch.nn.utils.rnn import pad_sequence

from tests.support.checks import slow
from tests.support.tiny_recordings import random_table, tokens_of
from timm_naflex_fast.commands.recordings.conventions import Convention, conventions
from timm_naflex_fast.commands.recordings.identify import DECIMALS, verdict
from timm_naflex_fast.functional import identify_resampling, resample_pos_embed

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
# Each is compared with all others. Those with one layout of the tokens follow one another.
MORE = ALL[16:160:16] + ALL[163::59]
BILINEAR = Convention("bilinear", cubic_coefficient=None)


@pytest.mark.parametrize("convention", [ALL[0], *map(slow, MORE)], ids=str)
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
    images = table.permute(2, 0, 1)[None]  # (1, C, H0, W0)
    result = grid_sample(
        images,
        positions,
        mode=mode,
        align_corners=corners,
        padding_mode=padding,
    )
    tokens = result[0].permute(1, 2, 0)  # (h, w, C)
    found = identify_resampling(table, size, tokens)
    equal = []
    for error, settings in found:
        if error < 1e-5:
            equal.append(Convention(**settings))
    assert equal[0].mode == mode and not equal[0].transposed
    places = [list(conventions([(1, *size)])).index(one) for one in equal]
    assert places == sorted(places)  # the plainest first


TABLE = random_table(5)
RESULT = torch.ones(16, 3)
SHAPES = r"table must be \(H0, W0, C\) and result \(16, C\), channels last; got \("
NOTHING = "nothing can be told of a table that is the same in every cell, sizes that"
WRONG = [
    ("table", TABLE[0], SHAPES),
    ("table", TABLE.permute(2, 0, 1), SHAPES),
    ("table", TABLE.to(torch.int64), "table must be a tensor of finite floating point numbers"),
    ("table", TABLE[:1, :1].expand(8, 9, 3), NOTHING),
    ("size", (4, 0), "must hold"),
    ("size", (8, 9), SHAPES.replace("16", "72")),
    ("result", RESULT[:15], SHAPES),
    ("result", RESULT.mT[None], SHAPES),
    ("result", RESULT + torch.nan, "result must be a tensor of finite floating point numbers"),
    ("result", RESULT * 0, NOTHING),
    ("result", None, "result must be a tensor"),
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


def smooth_table(seed):
    """Neighbouring cells are alike, as in a trained table."""
    coarse = random_table(seed, channels=24, size=(5, 5))
    return resample_pos_embed(coarse, (16, 16), mode="bicubic") + 3


TABLES = {"random": random_table(9, channels=24, size=(16, 16)), "smooth": smooth_table(9)}
ASKED = [(1, 4, 6), (1, 12, 8)]


def rounded(tensor, precision):
    return tensor.to(getattr(torch, precision)).float()


def judged(table, result, precision="float32"):
    sizes = [size[1:] for size in ASKED]
    return verdict(BILINEAR, table, sizes, result.float(), precision)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_port_in_half_precision_is_right_if_that_is_said(precision, kind):
    table = TABLES[kind]
    exact = tokens_of(BILINEAR, table, ASKED)
    of_rounded_table = tokens_of(BILINEAR, rounded(table, precision), ASKED)
    for result in (rounded(exact, precision), rounded(of_rounded_table, precision)):
        is_equal, lines = judged(table, result, precision)
        assert is_equal and f", within the rounding of {precision} (" in lines[0]
        is_equal, lines = judged(table, result)
        assert not is_equal and "not within the rounding of float32 (" in lines[0]
        assert any("say --precision " in line for line in lines)


def test_an_outlier_of_the_table_hides_nothing():
    table = TABLES["random"].clone()
    table[12, 1, 5] = 283
    result = tokens_of(BILINEAR, rounded(table, "bfloat16"), ASKED)
    is_equal, lines = judged(table, result)
    assert not is_equal and "say --precision " in lines[-1]
    assert judged(table, tokens_of(BILINEAR, table, ASKED))[0]


def test_another_convention_that_is_much_nearer_is_right_although_rounding_explains_both():
    table = rounded(TABLES["smooth"] + 100, "bfloat16")
    wrong = BILINEAR._replace(antialias=False, outside="border")
    is_equal, lines = judged(table, tokens_of(wrong, table, ASKED), "bfloat16")
    assert not is_equal and "follows another, within the rounding of bfloat16 (" in lines[0]
    assert lines[1].endswith(" %  bilinear, no antialiasing")
    assert lines[4] == "the reference: bilinear, antialiased"


def test_conventions_that_the_sizes_do_not_tell_apart_are_counted():
    table = TABLES["random"]
    result = tokens_of(BILINEAR, table, [(1, 17, 19)]).float()
    is_equal, lines = verdict(BILINEAR, table, (17, 19), result)
    assert is_equal and re.match(r"\d+ conventions are as near; ", lines[-1])
