"""PyTorch's own resize, right where PyTorch is not: a grid of one column, and tables in any layout."""

import pytest
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative
from timm_naflex_fast.functional import resample_pos_embed, resample_pos_embeds

LAYOUTS = {
    "rows, columns, channels": lambda t: t.contiguous(),
    "channels first": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "columns first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda t: t[:, :1].expand_as(t),
    "with the negative bit": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_grids_of_one_column_whatever_the_tables_layout(layout, channels, strategy):
    table, sizes = LAYOUTS[layout](torch.randn(6, 5, channels)), [(9, 1), (1, 9), (1, 1), (4, 3), (6, 1)]
    assert table.is_neg() == (layout == "with the negative bit")
    exact = table.double().requires_grad_()
    two = torch.cat((exact, exact), -1)  # PyTorch itself is wrong about one channel
    want = torch.cat([image[:, :channels] for image in one_by_one(two, sizes, mode="bicubic")])
    for _ in range(3):
        got = resample_pos_embeds(table, sizes, mode="bicubic", strategy=strategy)
        assert relative(got, want) <= 2e-6
    assert relative(resample_pos_embed(table, (4, 3)).flatten(0, 1), want[19:31]) <= 2e-6
    got = resample_pos_embeds(table.requires_grad_(), sizes, mode="bicubic", strategy=strategy)
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((out * weight).sum(), leaf)[0] for out, leaf in ((got, table), (want, exact))]
    assert relative(got, want) <= 2e-6 and relative(*grads) <= 1e-5
