"""PyTorch's own resize, right where PyTorch is not, and differentiable twice as in timm."""

import pytest
import torch

from tests.support.oracles import BASE, relative
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds

LAYOUTS = {
    "rows, columns, channels": lambda t: t.contiguous(),
    "channels first": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "columns first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("grad", [False, True])
def test_grids_of_one_column_whatever_the_tables_layout(layout, channels, strategy, grad):
    table, sizes = torch.randn(6, 5, channels), [(9, 1), (1, 9), (1, 1), (4, 3), (6, 1)]
    wide = table.double().permute(2, 0, 1)[None].expand(2, -1, -1, -1).repeat(1, 2, 1, 1)
    wide = wide.contiguous(memory_format=torch.channels_last)
    resize = torch.nn.functional.interpolate
    parts = [resize(wide, s, mode="bicubic", antialias=True)[0, :channels].flatten(1).t() for s in sizes]
    given = LAYOUTS[layout](table).requires_grad_(grad)
    for _ in range(3):
        got = resample_pos_embeds(given, sizes, mode="bicubic", strategy=strategy)
        assert relative(got, torch.cat(parts)) <= 2e-6


def test_double_backward_works_as_in_timm():
    embeds, x = BASE.embeds(), BASE.x().requires_grad_()
    out = add_pos_embed_(x * 1, embeds.pos_embed, BASE.coord(), strategy="interpolate_cached", **BASE.options)
    (grad,) = torch.autograd.grad((out**2).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    assert embeds.pos_embed.grad.abs().max() > 0
