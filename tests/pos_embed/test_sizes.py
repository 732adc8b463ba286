"""The sizes of images, as other libraries give them."""

import numpy as np
import pytest
import torch

from timm_naflex_fast.pos_embed.sizes import Sizes

VALID = {
    "array": np.array([(3, 4), (4, 5)]),
    "NumPy's numbers": [(np.int64(3), np.int32(4)), (4, 5)],
    "frames": np.array([(1, 3, 4), (1, 4, 5)]),
    "tensor": torch.tensor([(3, 4), (4, 5)]),
}
INVALID = {
    "a number": 34,
    "a tensor of one number": torch.tensor(4),
    "a line": [3, 4],
    "one column": [(4,)],
    "four columns": [(1, 2, 3, 4)],
    "zero": [(0, 3)],
    "a float": [(2.0, 3)],
    "nothing": None,
}


@pytest.mark.parametrize("name", VALID)
def test_sizes_of_other_libraries_become_pythons_integers(name):
    found = Sizes(VALID[name]).on_host()
    assert found == [(1, 3, 4), (1, 4, 5)]
    for size in found:
        assert {type(n) for n in size} == {int}


@pytest.mark.parametrize("name", INVALID)
def test_what_are_no_sizes_is_named_with_what_sizes_are(name):
    message = r"grid_sizes must hold \(h, w\) or \(t, h, w\) for each image"
    with pytest.raises(ValueError, match=message):
        Sizes(INVALID[name]).on_host()


def test_all_frames_of_an_image_must_have_room_in_the_length():
    assert Sizes([(2, 3, 4)], length=24).on_host() == [(2, 3, 4)]
    with pytest.raises(ValueError, match="with at most length=23 tokens"):
        Sizes([(2, 3, 4)], length=23).on_host()
