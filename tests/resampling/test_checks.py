"""What may be written to; what may not is in contract/test_unusual_tensors.py."""

import torch

from timm_naflex_fast.resampling.checks import check_writable


def test_what_may_be_written_to():
    leaf = torch.zeros(2, 3, 4, requires_grad=True)
    with torch.no_grad():
        check_writable(leaf), check_writable(leaf[:1])
    for x in (leaf * 1, (leaf * 1)[:1], torch.zeros(12).as_strided((1, 3, 4), (0, 4, 1))):
        check_writable(x)
