"""PyTorch's own resize, right where PyTorch is not: a grid of one column, any table's layout."""

from unittest.mock import Mock

import pytest
import torch

from tests.support.checks import by_timms_method, one_by_one
from tests.support.oracles import NEW_TIMM, Case, relative, row_major, stock
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds

LAYOUTS = {
    "rows, columns, channels": lambda t: t.contiguous(),
    "channels first": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "columns first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda t: t[:, :1].expand_as(t),
    "NumPy's new axes": lambda t: (
        t[:, 0].clone().as_strided((1, 6, 1, t.shape[2]), (0, t.shape[2], 0, 1))
    ),
    "with the negative bit": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
}
SIZES = [(9, 1), (1, 9), (1, 1), (4, 3), (6, 1)]
# A table of one channel has no layout: PyTorch itself is wrong about it, and so is timm.
CHANNELS = [("matmul", 1), ("matmul", 3), ("interpolate_cached", 3)]


def exact_embeddings(table):
    """PyTorch's in float64, of a table of twice as many channels: it is wrong about one."""
    channels = table.shape[-1]
    twice = torch.cat((table, table), -1)
    return torch.cat([image[:, :channels] for image in one_by_one(twice, SIZES, mode="bicubic")])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy, channels", CHANNELS)
def test_grids_of_one_column_whatever_the_tables_layout(layout, channels, strategy):
    """Also after a change that moves no version."""
    table = LAYOUTS[layout](torch.randn(6, 5, channels))
    assert table.is_neg() == (layout == "with the negative bit")

    def embed():
        return resample_pos_embeds(table, SIZES, mode="bicubic", strategy=strategy)

    for _ in range(2):
        table.data[..., -1, -1, -1] += 1
        exact_table = table.double().requires_grad_()
        want = exact_embeddings(exact_table.reshape(table.shape[-3:]))
        for _ in range(3):  # met, made, and taken
            assert relative(embed(), want) <= 2e-6

    table.requires_grad_()
    got = embed()
    weight = torch.randn_like(got)
    (grad,) = torch.autograd.grad((got * weight).sum(), table)
    (exact_grad,) = torch.autograd.grad((want * weight).sum(), exact_table)
    assert relative(got, want) <= 2e-6
    assert relative(grad, exact_grad) <= 1e-5


def test_samples_of_one_grid_are_resized_once_whichever_tokens_they_kept(monkeypatch):
    interpolate = Mock(wraps=torch.nn.functional.interpolate)
    monkeypatch.setattr(torch.nn.functional, "interpolate", interpolate)
    whole = row_major([(6, 7)])[0]
    coord = torch.stack([whole[torch.randperm(41)[:20]] for _ in range(8)])
    coord[:, 0] = torch.tensor((5, 6))  # the corner tells the grid
    table = torch.randn(5, 5, 4)
    add_pos_embed_(torch.zeros(8, 20, 4), table, coord, strategy="interpolate_cached")
    assert interpolate.call_count == 1


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_timms_bits_in_a_model_that_is_channels_last(mode, antialias):
    """Wrong ones too: of a grid of one column, where ``matmul`` is right."""
    if not NEW_TIMM and not antialias:
        pytest.skip("this timm always antialiases")
    how = dict(mode=mode, antialias=antialias)
    case = Case(table_size=(32, 32), channels=48, sizes=[(70, 70), (20, 30), (3, 1)], **how)
    embeds = case.embeds().to(memory_format=torch.channels_last).requires_grad_(False)
    want = stock(case, embeds, case.x(), case.coord())
    got = by_timms_method(case, embeds, case.x(), case.coord(), "interpolate_cached")
    assert torch.equal(got, want)
