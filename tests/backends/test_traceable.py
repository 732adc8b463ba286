"""The plain operations; see contract/ for their result."""

import math

import pytest
import torch

from tests.support.oracles import NEW_TIMM, Case, relative, row_major, stock, tables
from timm_naflex_fast.backends import dispatch, traceable
from timm_naflex_fast.batch.layout import Coordinates, OneGrid
from timm_naflex_fast.patching.timm_methods import tables_of
from timm_naflex_fast.resampling import by_position
from timm_naflex_fast.resampling.spec import FLAG, ResizeSpec
from timm_naflex_fast.resampling.tables import PositionTable
from timm_naflex_fast.strategies import STRATEGIES

MATMUL = STRATEGIES["matmul"]


def coordinates_of_any_kind(case):
    """Coordinates at which timm's flag samples."""
    whole = case.coord()
    counts = torch.tensor([h * w for h, w in case.sizes])
    is_padding = (torch.arange(case.length) >= counts[:, None])[..., None]
    kinds = [whole, torch.where(is_padding, -1, whole)]
    if case.kind == "learned":  # timm looks a factorized table's position up: whole ones
        kinds.append(whole + torch.rand(whole.shape) * 0.5)
        kinds.append(whole - 0.3)
        kinds.append(torch.where(is_padding, -1.0, whole + 0.5))
    return kinds


@pytest.mark.skipif(not NEW_TIMM, reason="older timm takes whole coordinates for its flag")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("ar_preserving", [False, True])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table_size", [(6, 5), (33, 40), (128, 128), (1, 7)], ids=str)
def test_timms_flag_at_any_coordinate(table_size, mode, align_corners, ar_preserving, kind):
    how = dict(mode=mode, align_corners=align_corners, ar_preserving=ar_preserving)
    sizes = [(3, 4), (9, 2), (1, 1), (20, 14)]
    case = Case(
        kind=kind, sizes=sizes, table_size=table_size, channels=16, use_grid_sample=True, **how
    )
    embeds = case.embeds().requires_grad_(False)
    spec = case.spec(FLAG)
    largest = max(1, *(table.abs().max() for table in tables(embeds)))
    for coord in coordinates_of_any_kind(case):
        want, got = torch.zeros(2, *coord.shape[:2], 16)
        stock(case, embeds, want, coord)
        traceable.add(got, tables_of(embeds).whole(), coord, spec)
        assert (got - want).abs().max() <= 2e-6 * largest


def layouts_of(grid):
    """The ways to say that two samples have this grid."""
    return [OneGrid(*grid), Coordinates(row_major([grid] * 2))]


def added(x, table, layout, spec, context):
    """The result and the gradients of the table's parts."""
    out = x.clone()
    dispatch.add(out, table, layout, spec, MATMUL, context)
    return out, *torch.autograd.grad(out.float().square().sum(), table.parts)


TABLES = [
    ("bicubic", [(6, 5)]),
    ("linear", [(6,), (5,)]),
    ("bilinear", [(128, 2)]),
    ("bicubic", [(130, 3)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ar_preserving", [False, True])
@pytest.mark.parametrize("mode, shapes", TABLES, ids=str)
def test_equals_the_eager_backend_rounded_as_often(mode, shapes, ar_preserving, dtype, monkeypatch):
    is_large = shapes[0][0] >= 128
    if is_large:
        monkeypatch.setattr(
            by_position, "_one_product", None
        )  # without antialiasing it is gathered
    spec = ResizeSpec(mode, not is_large and mode != "linear", is_large, ar_preserving)
    table = PositionTable(
        tuple(torch.randn(*shape, 16).to(dtype).requires_grad_() for shape in shapes)
    )

    for grid in ((6, 5), (6, 9), (4, 5), (shapes[0][0], 3)):
        for layout in layouts_of(grid):
            x = torch.randn(2, math.prod(grid), 16).to(dtype)
            want, *want_grads = added(x, table, layout, spec, None)
            got, *grads = added(x, table, layout, spec, "export")

            is_exact = dtype == torch.float32
            assert relative(got, want) <= (2e-6 if is_exact else 0.01)
            assert is_exact or (got != want).float().mean() < 0.01
            for grad, want_grad in zip(grads, want_grads, strict=True):
                assert relative(grad, want_grad) <= (1e-5 if is_exact else 0.02)


@pytest.mark.parametrize(
    "cell",
    # The number of the last two overflows.
    [(0, 4288), (-1, 0), (0, -1), (2**24 - 1, 2**40 - 1), (2**40 - 1, 2**24 - 1)],
)
def test_tokens_of_a_grid_without_cells_or_with_too_many_become_nan(cell):
    place, embedded = traceable.token_positions(torch.tensor([[cell] * 3]), ResizeSpec())
    assert embedded.all()
    assert place.y.isnan().all()
    assert place.x.isnan().all()


def test_tokens_of_the_largest_grid_do_not():
    place, embedded = traceable.token_positions(torch.tensor([[(0, 4287)] * 3]), ResizeSpec())
    assert embedded.all()
    assert not place.y.isnan().any()
    assert not place.x.isnan().any()


def test_coordinates_of_8_bits_are_counted_in_more():
    flag = ResizeSpec("bilinear", antialias=False, reference=FLAG)
    coord = torch.full((1, 1, 2), 255, dtype=torch.uint8)
    assert traceable.token_positions(coord, flag)[0].h.item() == 256
