"""Reading the grids of a batch from its coordinates."""

import numpy as np
import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.batch import grids
from timm_naflex_fast.batch.checks import check_tokens
from timm_naflex_fast.batch.grids import plan_batch, sizes_on_host
from timm_naflex_fast.resampling.matrices import ResizeSpec

SQUARE = ResizeSpec(ar_preserving=True)


def only(y, x, tokens):
    """Tokens of one sample that all lie in one cell, and their coordinates."""
    coord = torch.tensor([[[y, x]]]).expand(1, tokens, 2)
    return coord.float(), coord


def test_how_many_cells_a_grid_may_have():
    for most in (
        only(64, 63, 1),
        only(63, 67, 4),
    ):  # 65 x 64 = 64 * 1 + 4096, 64 x 68 = 64 * 4 + 4096
        assert len(plan_batch(*most, ResizeSpec()).groups) == 1
    with pytest.raises(
        ValueError, match=r"a grid of 19 x 219 cells, too many for 1 tokens; .* = 4160 cells"
    ):
        plan_batch(*only(18, 218, 1), ResizeSpec())
    assert len(plan_batch(*only(0, 499, 4), SQUARE).groups) == 1
    coord = torch.tensor(
        [[[2**31 - 2, 0]] * 2, [[0, 0], [-1, -1]]]
    )  # the longest grid, and negative padding beside it
    for turned in (coord, coord.flip(-1)):
        with pytest.raises(ValueError, match=r"2147483647.* cells, too many"):
            plan_batch(coord.float(), turned, ResizeSpec())
    nothing = torch.zeros(2, 0, 4)
    assert plan_batch(nothing, nothing[..., :2], SQUARE) == (
        [],
        [(0, 0)] * 2,
        SQUARE,
        torch.float32,
        torch.float32,
    )
    with pytest.raises(
        ValueError,
        match=r"a grid of 1 x 500 cells, resized as 500 x 500 \(ar_preserving\), too many",
    ):
        plan_batch(*only(0, 499, 4), SQUARE, resizes_square=True)
    coord = row_major([(1, 500)])
    assert (
        len(plan_batch(coord.float(), coord, SQUARE, resizes_square=True).groups) == 1
    )  # no token is missing


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("images, padding", [(2, 0), (1, 5)])
def test_whole_images_and_a_padded_one_are_told_at_once_and_alike(
    monkeypatch, images, padding, turned
):
    coord = row_major([(3, 4)] * images, 12 + padding)
    coord = coord.flip(-1) if turned else coord  # column by column: not whole rows
    assert grids._row_major(4).startswith(row_major([(3, 4)]).numpy().tobytes())
    with monkeypatch.context() as at_once:
        at_once.setattr(grids, "MAX_SAVED", 12)
        at_once.setattr(
            grids, "mul", grids.mul if turned else None
        )  # which only the slow way needs
        found, _ = grids.read_grids(coord), turned or grids.read_grids(row_major([(1, 4)]))
    monkeypatch.setattr(grids, "MAX_SAVED", 0)
    slowly = grids.read_grids(coord)
    assert found[:2] == slowly[:2] and found[3] == slowly[3] == [turned] * images
    assert (found[2] is None) == (slowly[2] is None) == (not turned)


def test_each_token_names_its_cell_where_all_samples_lost_some_and_where_padding_is_embedded():
    whole = row_major([(3, 4), (4, 5)], 20)
    coord = torch.stack([whole[0, [11, 0, 7, 3]], whole[1, [19, 0, 1, 2]]])
    heights, widths, cell, reordered = grids.read_grids(coord)
    assert (heights, widths, cell.tolist()) == ([3, 4], [4, 5], [[11, 0, 7, 3], [19, 0, 1, 2]])
    assert reordered == [True, True]
    plan = plan_batch(coord.float(), coord, ResizeSpec())
    assert [group.cell_index[n].tolist() for n, group in enumerate(plan.groups)] == cell.tolist()
    coord = row_major([(1, 2), (2, 1)], 3)
    coord[0, 2] = coord[0, 1]  # padding that names a cell counts where padding is embedded
    assert grids.read_grids(coord, True)[3] == [True, False] and grids.read_grids(coord + 0.5)[
        3
    ] == [False, False]


def test_sizes_of_other_libraries_and_what_is_none():
    for sizes in (
        np.array([(3, 4), (4, 5)]),
        [(np.int64(3), np.int32(4)), (4, 5)],
        np.array([(1, 3, 4), (1, 4, 5)]),
    ):
        found = sizes_on_host(sizes, batch=2)
        assert found == [(1, 3, 4), (1, 4, 5)] and all(
            type(n) is int for size in found for n in size
        )
    frames = [torch.tensor(4), torch.tensor([4, 4]), [(4,)], [(1, 2, 3, 4)], [(0, 3)], [(2.0, 3)]]
    for wrong in (
        *frames,
        np.array([(3.0, 4.0)]),
        np.array([(True, True)]),
        np.array(4),
        "34",
        34,
        [3, 4],
        None,
    ):
        with pytest.raises(
            ValueError, match=r"grid_sizes must hold \(h, w\) or \(t, h, w\) for each image"
        ):
            sizes_on_host(wrong)
    with pytest.raises(ValueError, match="got list"):
        check_tokens(torch.zeros(1, 1, 4), 4, [[0, 0]])
    for few, got in ((4, r"\]$"), (5, r"\] and more$")):
        with pytest.raises(ValueError, match=got):
            sizes_on_host([(0, 3)] * few)
