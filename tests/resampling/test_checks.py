"""Arguments that cannot be right are named, before anything is written."""

import pytest
import torch

from timm_naflex_fast.functional import resample_patch_kernel, resample_pos_embed
from timm_naflex_fast.resampling.checks import check_writable


def test_what_may_be_written_to():
    leaf = torch.zeros(2, 3, 4, requires_grad=True)
    with torch.no_grad():
        check_writable(leaf), check_writable(leaf[:1])
    for x in (leaf * 1, (leaf * 1)[:1], torch.zeros(12).as_strided((1, 3, 4), (0, 4, 1))):
        check_writable(x)


@pytest.mark.parametrize("size", [2, (2.5, 2), ("a", 1), (0, 2), (2, 2, 2)])
def test_a_size_that_is_no_pair_of_integers(size):
    for resample, tensor in (
        (resample_pos_embed, torch.zeros(3, 3, 4)),
        (resample_patch_kernel, torch.zeros(2, 3, 4, 4)),
    ):
        with pytest.raises(ValueError, match=r"size must be \(h, w\)"):
            resample(tensor, size)
