"""The Triton kernels against timm's own code and float64 truth: on a GPU, or run by Triton's interpreter on the CPU.

Triton decides at import whether it interprets, so ``test_by_the_interpreter`` runs the rest of this file in a process
of its own. What it cannot show, races and the compiled code, ``test_triton_kernels.py`` does; neither shows time.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checks import as_close_to_float64_as_timm, equals_timm, run
from tests.support.interpreter import DEVICE, HAS_TRITON, INTERPRETED, TOO_NEW_NUMPY, run_interpreted, runs
from tests.support.interpreter import small as small
from tests.support.oracles import NEW_TIMM, Case, relative, row_major, stock
from timm_naflex_fast import enable
from timm_naflex_fast.backends import operator as operator
from timm_naflex_fast.backends import triton as matmul_triton
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.resampling.matrices import ResizeSpec, resize_matrix

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
BASE = Case(sizes=[(2, 3), (4, 2), (3, 4), (2, 3)], table_size=(3, 4), channels=5, length=13)
SETTINGS = [(aa, mode) for aa in (True, False) for mode in ("bilinear", "bicubic") if aa or NEW_TIMM]


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """Without the trial before each kernel, of which ``test_trial.py`` is."""
    monkeypatch.setattr(matmul_triton, "agrees", lambda *_: True)


def add_learned(x, table, coord, spec):
    matmul_triton.add(x, (table,), coord, spec)


def ours(case, embeds, x, coord):
    add_learned(x, embeds.pos_embed, coord, case.spec)


def check(case, coord=None):
    equals_timm(ours, case, coord, DEVICE)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests run here")
@pytest.mark.skipif(TOO_NEW_NUMPY, reason="the interpreter of this Triton needs numpy < 2.4")
@pytest.mark.parametrize(
    "which", ["test_equals_timm and bilinear and True", pytest.param("test_", marks=pytest.mark.slow)]
)
def test_by_the_interpreter(which):
    run_interpreted(__file__, which)


@runs
@pytest.mark.parametrize("antialias, mode", SETTINGS)
def test_equals_timm(antialias, mode):
    for corners, ar in [(False, True), (True, False)] if NEW_TIMM else [(False, True)]:
        check(
            Case(
                sizes=[(3, 4), (6, 2), (4, 3)],
                table_size=(4, 3),
                channels=3,
                mode=mode,
                antialias=antialias,
                align_corners=corners,
                ar_preserving=ar,
                length=11,
            )
        )


def test_nothing_is_launched_where_autograd_forbids_to_write(monkeypatch):
    launched, table = [], torch.zeros(3, 4, 4)
    monkeypatch.setattr(matmul_triton, "read_batch", lambda *_: None)
    monkeypatch.setattr(matmul_triton, "launch_forward", lambda *_: launched.append(1))
    x = torch.zeros(1, 12, 8, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=r"multiple views|in-?place"):
        add_learned(x.split(4, -1)[1], table, row_major([(3, 4)]), ResizeSpec())
    assert not launched
    add_learned(x[..., :4], table, row_major([(3, 4)]), ResizeSpec())
    assert launched


@runs
@pytest.mark.parametrize("length", [None, 14])
def test_equals_timm_by_sizes_in_bilinear_mode(length, monkeypatch):
    table, sizes = torch.randn(4, 3, 5), [(3, 4), (6, 2), (4, 3)]
    how = dict(mode="bilinear", length=length, padding="first")
    want_table, got_table = (table.clone().to(device).requires_grad_() for device in ("cpu", DEVICE))
    want = resample_pos_embeds(want_table, sizes, **how)
    ran, add = [], matmul_triton.add
    monkeypatch.setattr(matmul_triton, "serves", lambda *_: True)
    monkeypatch.setattr(matmul_triton, "add", lambda *a: ran.append(1) or add(*a))
    got = resample_pos_embeds(got_table, sizes, **how)
    assert ran and relative(got.cpu(), want) <= 2e-6
    weight = torch.randn_like(want)
    for out in (got, want):
        (out * weight.to(out.device)).sum().backward()
    assert relative(got_table.grad.cpu(), want_table.grad) <= 1e-5


@st.composite
def small_cases(draw):
    side = st.integers(1, 6)
    sizes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=2))
    longest = max(h * w for h, w in sizes)
    antialias, mode = draw(st.sampled_from(SETTINGS))
    return Case(
        table_size=draw(st.tuples(side, side)),
        channels=draw(st.sampled_from([2, 3, 17])),  # of one channel PyTorch itself makes wrong columns
        mode=mode,
        antialias=antialias,
        align_corners=draw(st.booleans()) and NEW_TIMM,
        ar_preserving=draw(st.booleans()),
        sizes=sizes,
        length=max(1, longest + draw(st.sampled_from([0, 2, -1, -longest // 2]))),
        dtype=torch.float32,
        seed=draw(st.integers(0, 2**20)),
    )


@runs
@settings(max_examples=300 if DEVICE == "cuda" else 8)
@given(small_cases())
def test_equals_timm_on_random_settings(case):
    check(case)


@runs
@pytest.mark.parametrize("sizes", [[(2, 40)], [(41, 1)]], ids=["wide", "tall"])
def test_lines_longer_than_a_product(sizes):
    check(Case(sizes=sizes, table_size=(3, 4), channels=2, length=80))


@runs
def test_a_table_wider_than_a_product():
    check(Case(sizes=[(1, 3), (2, 50)], table_size=(2, 70), channels=2, mode="bilinear"))


@runs
@pytest.mark.parametrize("antialias, mode", SETTINGS)
def test_is_as_close_to_float64_as_timm(antialias, mode):
    case = Case(sizes=[(3, 4), (9, 2)], table_size=(7, 6), channels=512, mode=mode, antialias=antialias, seed=11)
    as_close_to_float64_as_timm(ours, case, DEVICE)


@runs
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=pytest.mark.skipif(INTERPRETED, reason="it truncates")), torch.float16],
    ids=str,
)
@pytest.mark.parametrize("antialias", [True, False] if NEW_TIMM else [True])
def test_half_precision_rounds_before_the_addition(dtype, antialias):
    case = Case(sizes=[(3, 4), (5, 7), (6, 5)], channels=33, antialias=antialias, length=36, dtype=dtype)
    embeds, coord, want = case.embeds(), case.coord(), case.x()
    embedding = torch.zeros_like(want, dtype=torch.float32)
    with torch.no_grad():
        stock(case, embeds, want, coord)
        stock(case, embeds, embedding, coord)
        got = case.x().to(DEVICE)
        ours(case, embeds.to(DEVICE), got, coord.to(DEVICE))
    got, near = got.cpu(), (case.x() + (embedding + d).to(dtype) for d in (-2e-6, 0.0, 2e-6))
    assert ((got == want) | torch.stack([choice == got for choice in near]).any(0)).all()
    assert (got != want).sum() <= 0.01 * got.numel()


@runs
@pytest.mark.parametrize("antialias", [True, False] if NEW_TIMM else [True])
def test_reordered_and_dropped_tokens_get_their_own_cell(antialias):
    sizes = [(4, 5), (3, 3)]
    case = Case(sizes=sizes, antialias=antialias, length=20)
    embeds, coord = case.embeds(), case.coord()
    order = torch.stack([torch.cat((torch.randperm(h * w), torch.arange(h * w, 20))) for h, w in sizes])
    order[1] = torch.arange(20)  # beside a sample that is in order
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    index = order[..., None].expand(-1, -1, 4)
    x = case.x().gather(1, index).to(DEVICE).requires_grad_()
    out, shuffled = x * 1, coord.gather(1, index[..., :2])
    embeds.to(DEVICE)
    ours(case, embeds, out, shuffled.to(DEVICE))
    grads = torch.autograd.grad((out * weight.gather(1, index).to(DEVICE)).sum(), [x, embeds.pos_embed])
    torch.testing.assert_close(out.detach().cpu(), want.gather(1, index), atol=2e-6, rtol=0)
    assert torch.equal(grads[0].cpu(), want_gx.gather(1, index)) and relative(grads[1].cpu(), want_gp[0]) <= 1e-5
    kept = torch.tensor([7, 3, 19, 12])  # the last cell stays, so the grid does
    with torch.no_grad():
        few = case.x()[:1, kept].to(DEVICE)
        ours(case, embeds, few, coord[:1, kept].to(DEVICE))
    torch.testing.assert_close(few.cpu(), want[:1, kept], atol=2e-6, rtol=0)


@runs
def test_padding_is_untouched_and_its_gradient_counts_for_nothing():
    embeds, coord = BASE.embeds().to(DEVICE), BASE.coord().to(DEVICE)
    x = torch.full((4, 13, 5), -0.0, device=DEVICE)
    with torch.no_grad():
        ours(BASE, embeds, x, coord)
    padding = torch.tensor([[n >= h * w for n in range(13)] for h, w in BASE.sizes], device=DEVICE)
    assert torch.signbit(x[padding]).all() and (x[padding] == 0).all()
    grads = []
    for filler in (0.0, float("nan")):
        out = x.clone()
        ours(BASE, embeds, out, coord)
        g = torch.where(padding[..., None], filler, torch.ones_like(out))
        grads.append(torch.autograd.grad(out, embeds.pos_embed, g)[0])
    assert torch.equal(*grads)


@runs
def test_a_grid_of_the_tables_size_is_added_as_it_is():
    case = Case(sizes=[(6, 5)], channels=5, ar_preserving=True)
    embeds, x = case.embeds().to(DEVICE), torch.zeros(1, 30, 5, device=DEVICE)
    with torch.no_grad():
        ours(case, embeds, x, case.coord().to(DEVICE))
    assert torch.equal(x, embeds.pos_embed.detach().view(1, 30, 5))


@runs
def test_a_negative_coordinate_is_nan_and_never_a_wrong_number():
    coord = BASE.coord()
    coord[1, 3] = torch.tensor([-1, 0])
    embeds, want, got = BASE.embeds(), BASE.x(), BASE.x().to(DEVICE)
    with torch.no_grad():
        stock(BASE, embeds, want, BASE.coord())
        ours(BASE, embeds.to(DEVICE), got, coord.to(DEVICE))
    assert got[1, 3].isnan().all()
    got[1, 3] = want[1, 3].to(DEVICE)
    torch.testing.assert_close(got.cpu(), want, atol=5e-6, rtol=0)


@runs
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9, 2.0**40])
def test_a_coordinate_that_no_grid_can_have_makes_its_sample_nan(value):
    coord = BASE.coord().to(torch.float32)
    coord[1, 3, 0] = value
    embeds, want, got = BASE.embeds(), BASE.x(), BASE.x().to(DEVICE)
    with torch.no_grad():
        stock(BASE, embeds, want, BASE.coord())
        ours(BASE, embeds.to(DEVICE), got, coord.to(DEVICE))
    got = got.cpu()
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2, 3]], want[[0, 2, 3]], atol=5e-6, rtol=0)


@runs
def test_with_a_sampler_padding_tokens_get_the_cell_that_they_name():
    spec, coord = ResizeSpec("bilinear", False, sampler="grid_sample"), BASE.coord().to(DEVICE)
    table = torch.randn(3, 4, 5, device=DEVICE, requires_grad=True)
    x, g = BASE.x().to(DEVICE), torch.randn(4, 13, 5, device=DEVICE)
    grids = []
    for h, w in BASE.sizes:
        a_h, a_w = (resize_matrix(n, n0, "bilinear", False).to(DEVICE) for n, n0 in ((h, 3), (w, 4)))
        grids.append(torch.einsum("hy, yxc, wx -> hwc", a_h, table, a_w))
    want = torch.stack([x[i] + grid[coord[i, :, 0], coord[i, :, 1]] for i, grid in enumerate(grids)])
    out = x * 1
    add_learned(out, table, coord, spec)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=0)
    grads = [torch.autograd.grad(result, table, g)[0].cpu() for result in (out, want)]
    assert relative(*grads) <= 1e-5


@runs
def test_out_of_place_copies_padding_bit_by_bit():
    table, coord = torch.randn(3, 4, 130, device=DEVICE), BASE.coord().to(DEVICE)
    x = torch.full((4, 13, 130), -0.0, device=DEVICE)
    out, plan = torch.empty_like(x), matmul_triton.read_batch(coord, x.device, table.shape, ResizeSpec())
    matmul_triton.launch_forward(x, out, table, plan, ResizeSpec())
    assert (x == 0).all() and torch.signbit(x).all()
    matmul_triton.launch_forward(x, x, table, plan, ResizeSpec())
    assert torch.equal(out.view(torch.int32), x.view(torch.int32)) and (x != 0).any()


@runs
def test_gradient_is_the_same_bit_for_bit():
    embeds, coord = BASE.embeds().to(DEVICE), BASE.coord()
    coord[0, :6] = coord[0, :6].flip(0)
    torch.use_deterministic_algorithms(True)
    try:
        (first, _, (first_grad,)), (second, _, (second_grad,)) = (run(ours, BASE, embeds, coord) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second) and torch.equal(first_grad, second_grad)


@runs
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.uint8], ids=str)
def test_strided_tensors_and_other_coordinates(dtype):
    embeds, coord = BASE.embeds(), BASE.coord()
    want, want_gx, want_gp = run(stock, BASE, embeds, coord)
    base = BASE.x().transpose(1, 2).contiguous()
    spread = torch.zeros(4, 13, 4, dtype=dtype)[..., ::2]
    spread.copy_(coord)
    got, got_gx, got_gp = run(ours, BASE, embeds.to(DEVICE), spread, base.transpose(1, 2))
    torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    assert torch.equal(got_gx, want_gx) and relative(got_gp[0], want_gp[0]) <= 1e-5


@runs
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_empty(shape):
    x, table = torch.zeros(*shape, 5, device=DEVICE), torch.randn(6, 5, 5, device=DEVICE, requires_grad=True)
    coord = torch.zeros(*shape, 2, dtype=torch.int64, device=DEVICE)
    add_learned(x, table, coord, ResizeSpec())
    assert x.shape == (*shape, 5)
    with torch.no_grad():
        assert matmul_triton.operator_sum(x, table, coord, ResizeSpec()).shape == x.shape
        grad = matmul_triton.operator_gradient(x, table.shape, coord, ResizeSpec())
    assert torch.equal(grad, torch.zeros_like(table))


@runs
def test_frozen_table_saves_nothing_and_passes_the_gradient():
    embeds, saved = BASE.embeds().requires_grad_(False).to(DEVICE), []
    x = BASE.x().to(DEVICE).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        out = x.clone()
        ours(BASE, embeds, out, BASE.coord().to(DEVICE))
    assert saved == []
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


@runs
def test_nothing_is_read_back_to_the_host(monkeypatch):
    embeds, coord = BASE.embeds().to(DEVICE), BASE.coord().to(DEVICE)
    run(ours, BASE, embeds, coord)

    def no_sync(*args, **kwargs):
        raise AssertionError("read back to the host")

    for read in ("tolist", "item", "__int__", "__bool__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, read, no_sync)
    out = BASE.x().to(DEVICE).requires_grad_() * 1
    ours(BASE, embeds, out, coord)
    out.sum().backward()


@runs
def test_operators_pass_opcheck():
    how, coord = ("bilinear", True, False, False, "interpolate"), row_major([(1, 2)]).to(DEVICE)
    x, table = (torch.randn(*shape, 2, device=DEVICE, requires_grad=True) for shape in ((1, 2), (2, 1)))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]  # with dynamic shapes: ten seconds more
    checks += ["test_aot_dispatch_dynamic"] * (not INTERPRETED)
    torch.library.opcheck(operator.on_triton.add, (x, table, coord, *how), test_utils=checks)
    torch.library.opcheck(operator.on_triton.grad, (x.detach(), coord, 2, 1, *how), test_utils=checks)


@runs
def test_whoever_saved_x_hears_that_it_changed():
    embeds, coord = BASE.embeds().to(DEVICE), BASE.coord().to(DEVICE)
    for table in (embeds.pos_embed.detach(), embeds.pos_embed):
        leaf = torch.ones(4, 13, 5, device=DEVICE, requires_grad=True)
        x = leaf * 1
        out = x.sin()  # saves x
        with torch.no_grad():
            add_learned(x, table, coord, ResizeSpec())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@runs
def test_lost_tokens_are_counted():
    before, coord, table = matmul_triton.lost_tokens(), BASE.coord(), torch.randn(3, 4, 5, device=DEVICE)
    x = torch.zeros(4, 13, 5, device=DEVICE)
    add_learned(x, table, coord.to(DEVICE), ResizeSpec())
    assert matmul_triton.lost_tokens() == before and not x.isnan().any()
    coord[1, 3] = torch.tensor([-1, 0])  # one token
    coord[2, 4, 0] = 2000  # all of a sample: longer than any matrix here
    add_learned(x, table, coord.to(DEVICE), ResizeSpec())
    assert matmul_triton.lost_tokens() - before == x.isnan().all(2).sum() == 1 + 13


@runs
def test_as_long_as_the_tokens_are_many_none_is_lost():
    table = torch.randn(3, 4, 2)
    for sizes in ([(1, 1100)], [(1100, 1)]):
        coord, want = row_major(sizes), torch.zeros(1, 1100, 2)
        add_pos_embed_(want, table, coord)
        got = torch.zeros(1, 1100, 2, device=DEVICE)
        add_learned(got, table.to(DEVICE), coord.to(DEVICE), ResizeSpec())
        torch.testing.assert_close(got.cpu(), want, atol=2e-6, rtol=0)


def test_more_tokens_than_there_are_lengths_take_another_form(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    table = torch.zeros(3, 4, 2)
    assert [matmul_triton.serves(torch.zeros(1, n, 2), table, ResizeSpec()) for n in (4095, 4096)] == [True, False]


@runs
def test_a_misaligned_tensor_never_meets_a_kernel(monkeypatch):
    embeds, coord, seen = BASE.embeds(), BASE.coord(), []
    want = run(stock, BASE, embeds, coord)[0]
    for name in ("launch_forward", "table_grad"):
        launch = getattr(matmul_triton, name)

        def look(*args, launch=launch):
            seen.extend(t.data_ptr() % 16 for t in args if isinstance(t, torch.Tensor))
            return launch(*args)

        monkeypatch.setattr(matmul_triton, name, look)
    room = torch.empty(4 * 13 * 5 + 1, device=DEVICE)[1:].view(4, 13, 5)
    room.copy_(BASE.x())
    table = embeds.pos_embed.detach().to(DEVICE)
    with torch.no_grad():
        add_learned(room, table, coord.to(DEVICE), BASE.spec)
    assert room.data_ptr() % 16 and set(seen) == {0}
    torch.testing.assert_close(room.cpu(), want, atol=5e-6, rtol=0)


@runs
def test_serves_in_eager_mode_and_in_graphs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(matmul_triton, "serves", lambda *_: True)
    embeds, coord = BASE.embeds(), BASE.coord()
    want, _, want_gp = run(stock, BASE, embeds, coord)
    embeds.to(DEVICE)
    launched, launch = [], matmul_triton.launch_forward
    monkeypatch.setattr(matmul_triton, "launch_forward", lambda *args: launched.append(1) or launch(*args))

    def patched(case, embeds, x, coord):
        with enable():
            embeds._apply_learned_naflex_pos_embed(x, coord)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(x, table, coord):
        return add_pos_embed_(x * 1, table, coord)

    def compiled(case, embeds, x, coord):
        x.copy_(graph(x, embeds.pos_embed, coord))

    for add in (patched, compiled):
        got, _, got_gp = run(add, BASE, embeds, coord)
        torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
        assert relative(got_gp[0], want_gp[0]) <= 1e-5
    assert len(launched) == 2
