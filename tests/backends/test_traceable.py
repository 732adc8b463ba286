"""The plain operations; see contract/ for their result."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.oracles import NEW_TIMM, Case, relative, row_major, stock, tables
from timm_naflex_fast.backends import dispatch, traceable
from timm_naflex_fast.batch.layout import OneGrid, Sizes
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.strategies import STRATEGIES


@pytest.mark.skipif(not NEW_TIMM, reason="older timm takes whole coordinates for its flag")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("ar_preserving", [False, True])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table_size", [(6, 5), (33, 40), (128, 128), (1, 7)], ids=str)
def test_timms_flag_at_any_coordinate(table_size, mode, align_corners, ar_preserving, kind):
    options = dict(
        mode=mode, align_corners=align_corners, ar_preserving=ar_preserving, use_grid_sample=True
    )
    case = Case(
        kind=kind,
        sizes=[(3, 4), (9, 2), (1, 1), (20, 14)],
        table_size=table_size,
        channels=16,
        **options,
    )
    embeds, whole = case.embeds(), case.coord()
    padding = torch.stack([torch.arange(case.length) >= h * w for h, w in case.sizes])[..., None]
    coords = [
        whole,
        torch.where(padding, -1, whole),
    ]  # timm looks a factorized table's position up: whole ones
    if kind == "learned":
        coords += [
            whole + torch.rand(whole.shape) * 0.5,
            whole - 0.3,
            torch.where(padding, -1.0, whole + 0.5),
        ]
    how = dict(
        reference="grid_sample" if kind == "learned" else "affine_grid", ar_preserving=ar_preserving
    )
    spec = replace(case.spec if kind == "learned" else ResizeSpec("linear", False), **how)
    for coord in coords:
        want, got = torch.zeros(2, *coord.shape[:2], 16)
        with torch.no_grad():
            stock(case, embeds, want, coord)
            traceable.add(got, tuple(tables(embeds)), coord, spec)
        assert (got - want).abs().max() <= 2e-6 * max(
            1, *(table.abs().max() for table in tables(embeds))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ar_preserving", [False, True])
@pytest.mark.parametrize(
    ("mode", "shapes"),
    [
        ("bicubic", [(6, 5)]),
        ("linear", [(6,), (5,)]),
        ("bilinear", [(128, 2)]),
        ("bicubic", [(130, 3)]),
    ],
    ids=str,
)
def test_equals_the_eager_backend_rounded_as_often(mode, shapes, ar_preserving, dtype, monkeypatch):
    tables, large = (
        [torch.randn(*shape, 16).to(dtype).requires_grad_() for shape in shapes],
        shapes[0][0] >= 128,
    )
    spec = ResizeSpec(mode, mode != "linear" and not large, large, ar_preserving)
    if large:
        monkeypatch.setattr(traceable, "_by_product", None)  # without antialiasing it is gathered
    for grid in ((6, 5), (6, 9), (4, 5), shapes[0][:1] + (3,)):
        for where in (
            OneGrid(*grid),
            row_major([grid] * 2),
            Sizes(torch.tensor([grid] * 2, dtype=torch.uint8), (2,)),
        ):
            x = torch.randn(2, math.prod(grid), 16).to(dtype)
            outs = want, got = x.clone(), x
            for out, context in zip(outs, (None, "export")):
                dispatch.add(out, tuple(tables), where, spec, STRATEGIES["matmul"], context)
            grads = [torch.autograd.grad(out.float().square().sum(), tables) for out in outs]
            assert all(
                relative(*both) <= (1e-5 if dtype == torch.float32 else 0.02)
                for both in zip(*grads)
            )
            assert relative(got, want) <= (2e-6 if dtype == torch.float32 else 0.01)
            assert dtype == torch.float32 or (got != want).float().mean() < 0.01


def test_tokens_of_a_grid_without_cells_or_with_too_many_become_nan():
    for cell in (
        (0, 4287),
        (0, 4288),
        (-1, 0),
        (0, -1),
        (2**24 - 1, 2**40 - 1),
        (2**40 - 1, 2**24 - 1),
    ):
        place = traceable.token_positions(
            torch.tensor([[cell] * 3]), ResizeSpec()
        )  # the last two's number overflows
        assert place.embedded.all() and place.y.isnan().any() == place.x.isnan().all() == (
            cell != (0, 4287)
        )


def test_dtypes_in_which_numbers_are_counted_and_handed_on():
    flag = ResizeSpec("bilinear", reference="grid_sample")
    assert (
        traceable.token_positions(torch.full((1, 1, 2), 255, dtype=torch.uint8), flag).h.item()
        == 256
    )
    assert (
        traceable.gradient(torch.ones(1, 1, 2), (2, 3, 2), torch.zeros(1, 1, 2), flag).dtype
        == torch.float32
    )
