"""Whether a tensor holds the same bits as before."""

import pytest
import torch

from timm_naflex_fast.resampling.same_bits import copy_of, same_bits

LAYOUTS = {
    "contiguous": lambda whole: whole[:-1],
    "transposed": lambda whole: whole.transpose(0, 2),
    "offset": lambda whole: whole[1:],
    "last axis of length 1": lambda whole: whole[:1].permute(1, 2, 0),
    "one number": lambda whole: whole[::2, ::2, ::2][:1, :1, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64], ids=str)
def test_every_dtype_and_layout_is_compared(dtype, layout):
    whole = torch.randn(4, 5, 3) * 9
    source = LAYOUTS[layout](whole.to(dtype))
    before = copy_of(source)
    assert torch.equal(before.tensor, source)
    assert same_bits(before, source)
    source[-1, -1, -1] += 1
    assert not same_bits(before, source)


def test_another_shape_or_dtype_is_not_the_same():
    source = torch.zeros(4, 3)
    before = copy_of(source)
    assert not same_bits(before, source.flatten())
    assert not same_bits(before, source.view(torch.int32))


def test_zeros_of_another_sign_are_not_the_same():
    assert not same_bits(copy_of(torch.zeros(3)), -torch.zeros(3))
