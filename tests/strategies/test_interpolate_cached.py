"""PyTorch's own resize, right where PyTorch is not: a grid of one column, and tables in any
layout."""

import pytest
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative, row_major
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embed, resample_pos_embeds

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
    table, sizes = (
        LAYOUTS[layout](torch.randn(6, 5, channels)),
        [(9, 1), (1, 9), (1, 1), (4, 3), (6, 1)],
    )
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
    grads = [
        torch.autograd.grad((out * weight).sum(), leaf)[0]
        for out, leaf in ((got, table), (want, exact))
    ]
    assert relative(got, want) <= 2e-6 and relative(*grads) <= 1e-5


def test_samples_of_one_grid_are_resized_once_whichever_tokens_they_kept(monkeypatch):
    calls, interpolate = [], torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *a, **k: calls.append(1) or interpolate(*a, **k)
    )
    coord = torch.stack([row_major([(6, 7)])[0, torch.randperm(41)[:20]] for _ in range(8)])
    coord[:, 0] = torch.tensor((5, 6))
    table, x = torch.randn(5, 5, 4, requires_grad=True), torch.zeros(8, 20, 4)
    got = add_pos_embed_(x * 1, table, coord, strategy="interpolate_cached")
    assert len(calls) == 1
    (want,) = one_by_one(table, [(6, 7)], mode="bicubic")
    want = want[coord[..., 0] * 7 + coord[..., 1]]
    grads = [
        torch.autograd.grad((out * torch.arange(20)[:, None]).sum(), table)[0]
        for out in (got, want)
    ]
    assert relative(got, want) <= 2e-6 and relative(*grads) <= 1e-5
