"""Every convention of resampling is told from every other one."""

import pytest
import torch
from torch.nn.functional import affine_grid, grid_sample
from torch.nn.utils.rnn import pad_sequence

from tests.support.checks import one_by_one, slow
from timm_naflex_fast.functional import identify_resampling, resample_pos_embed, resample_pos_embeds
from timm_naflex_fast.recordings.conventions import Convention, conventions
from timm_naflex_fast.recordings.identify import DECIMALS

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
ALL = list(conventions(SIZES))
# Each is compared with all others.
MORE = [*ALL[1:53:5], *ALL[53::59]]
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
    convention = Convention(mode, coefficient, antialias, "border", corners, positions)
    table = random_table(0, size=(n0, n0 + 1)).double()
    sizes = [(1, 1, 2), (1, 3, 17), (1, 8, 5), (1, n0, n0 + 1)]
    got = convention.tokens(table, sizes)
    how = dict(mode=mode, antialias=antialias, align_corners=corners)
    want = torch.cat(one_by_one(table, sizes, **how))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_without_settings_it_is_pytorchs_antialiased_bicubic():
    table = random_table(0).double()
    sizes = [(1, 5, 12)]
    want = torch.cat(one_by_one(table, sizes, mode="bicubic", antialias=True))
    torch.testing.assert_close(Convention().tokens(table, sizes), want, atol=1e-6, rtol=1e-6)


def test_no_two_conventions_give_the_same_result():
    table = random_table(0).double()
    results = torch.stack([convention.tokens(table, SIZES).flatten() for convention in ALL])
    distance = torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf)
    assert distance.min() / table.abs().max() > 1e-4


@pytest.mark.parametrize("convention", [ALL[0], *map(slow, MORE)], ids=str)
def test_each_is_identified_from_float32_whatever_the_padding_holds(convention):
    table = random_table(3)
    tokens = convention.tokens(table.double(), SIZES).float()
    images = tokens.split([t * h * w for t, h, w in SIZES])
    padded = pad_sequence(images, batch_first=True, padding_value=9.0)
    found = identify_resampling(table[None], torch.tensor(SIZES), padded)
    error, best = found[0]
    assert Convention(**best) == convention and error < 1e-6
    errors = [round(error, DECIMALS) for error, _ in found]
    assert errors == sorted(errors) and errors[1] > 1e-4
    assert len(found) == len(ALL)


def test_every_channel_counts():
    table = random_table(4, channels=40)
    result = resample_pos_embed(table, (5, 7))
    result[..., 35] += 1
    error, _ = identify_resampling(table, (5, 7), result)[0]
    assert error * result.abs().max() == pytest.approx(1, abs=1e-5)


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
    result = grid_sample(table.permute(2, 0, 1)[None], positions, **options)  # (1, C, h, w)
    found = identify_resampling(table, size, result[0].permute(1, 2, 0))
    equal = [Convention(**settings) for error, settings in found if error < 1e-5]
    assert equal[0].mode == mode and not equal[0].transposed
    assert equal == [one for one in conventions([(1, *size)]) if one in equal]  # the plainest first


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
    got = BILINEAR._replace(transposed=transposed).tokens(table, [(1, 6, 4)])
    torch.testing.assert_close(got, want.flatten(0, 1), atol=1e-6, rtol=0)


def test_what_frames_and_blocks_mean():
    table = random_table(8).double()
    sizes = [(2, 6, 12), (1, 12, 6)]
    want = resample_pos_embeds(table, sizes, mode="bilinear", merge=3)
    got = BILINEAR._replace(merge=3).tokens(table, sizes)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_asymmetric_position_i_is_i_times_the_scale():
    matrix = Convention("bilinear", None, antialias=False, positions="asymmetric").matrix(4, 8)
    assert matrix.argmax(1).tolist() == [0, 2, 4, 6]


TABLE = random_table(5)
RESULT = torch.ones(16, 3)
WRONG = {
    "table": [TABLE[0], TABLE.to(torch.int64), TABLE + torch.nan, TABLE[:1, :1].expand(8, 9, 3)],
    "size": [(4, 0), (4.0, 4.0)],
    "result": [RESULT[:15], RESULT + torch.nan, None],
}


@pytest.mark.parametrize("argument", WRONG)
def test_bad_input_is_named(argument):
    good = dict(table=TABLE, size=(4, 4), result=RESULT)
    assert identify_resampling(**good)
    for wrong in WRONG[argument]:
        with pytest.raises(ValueError, match=r"must (be|have|hold|name|differ)"):
            identify_resampling(**{**good, argument: wrong})
