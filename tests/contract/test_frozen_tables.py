"""Tables that are not trained: what is resized of them is kept, found again, and never out of date."""

from functools import partial
from itertools import product

import pytest
import torch

from tests.support.checks import HALF, during, slow
from tests.support.oracles import OLD_TORCH, Case, finished_tables, relative, trained
from tests.support.running import running
from tests.support.whole_models import build, one_image
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    add_pos_embed_,
    resample_pos_embeds,
)
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.pos_embed import kept

CASE = Case(sizes=[(3, 4), (9, 2), (3, 4), (6, 3), (3, 5), (6, 5)], length=40)


@pytest.fixture(params=STRATEGY_NAMES)
def add(request):
    def add(table, x=None):
        x = CASE.x() if x is None else x
        return add_pos_embed_(x, table, CASE.coord(), strategy=request.param)

    return add


def test_the_third_call_resamples_nothing_in_each_dtype_of_x(add, monkeypatch):
    table = torch.randn(6, 5, 4)
    wants = {}
    for dtype in (*HALF, torch.float32):
        wants[dtype] = add(table.clone(), CASE.x().to(dtype))
        for _ in range(2):
            assert torch.equal(add(table, CASE.x().to(dtype)), wants[dtype])

    monkeypatch.setattr(torch, "embedding_bag", None)
    monkeypatch.setattr(torch.nn.functional, "interpolate", None)
    for dtype, want in wants.items():
        assert torch.equal(add(table, CASE.x().to(dtype)), want)


def swapped(tables):
    """Exchange the parameter by ``torch.utils.swap_tensors``, which no weak reference may hold."""
    with during(torch.__future__.set_swap_module_params_on_conversion, True, after=False):
        tables.double().float()


def elsewhere(tables):
    """Move the bits, so that somebody else uses the old memory."""
    old = tables[0].data
    tables[0].data = old.clone()
    old.zero_()


WRITES = {
    "last bit": lambda tables: tables[0].data.view(-1)[-1:].mul_(1 + 2**-23),
    "in place": lambda tables: tables[0].mul_(2),
    "bfloat16 and back": lambda tables: tables.to(torch.bfloat16).float(),
    "swapped": swapped,
    "elsewhere": elsewhere,
}


@pytest.mark.parametrize("name", WRITES)
def test_right_after_every_write(add, name):
    forms = [torch.no_grad] if name != "in place" else [torch.no_grad, torch.inference_mode]
    for without_gradients, calls in product(forms, (1, 2, 3)):
        with without_gradients():
            tables = torch.nn.ParameterList([torch.randn(6, 5, 4)])
            for _ in range(calls):
                add(tables[0])
            WRITES[name](tables)
            want = add(tables[0].detach().clone())
            for _ in range(3):
                assert torch.equal(add(tables[0]), want)


@pytest.mark.parametrize("changed", ["table_y", "table_x"])
def test_right_after_a_write_to_either_factorized_table_and_nothing_old_stays(changed):
    tables = {"table_y": torch.randn(6, 4), "table_x": torch.randn(5, 4)}

    def add():
        return add_factorized_pos_embed_(CASE.x(), **tables, patch_coord=CASE.coord())

    for _ in range(3):
        old = add()
    assert finished_tables() > 0
    tables[changed].data[-1, -1] += 1
    got = add()
    assert finished_tables() == 0
    kept.clear_all()
    assert torch.equal(got, add())
    assert not torch.equal(got, old)


def test_kept_in_inference_mode_it_serves_training_of_what_comes_before(add):
    table = torch.randn(6, 5, 4)
    with torch.inference_mode():
        for _ in range(3):
            add(table)
    leaf = CASE.x().requires_grad_()
    out = add(table, leaf * 1)
    assert torch.equal(out.detach(), add(table.clone()))
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * out.detach())


@pytest.mark.parametrize("writes_before", ["copying", "resizing"])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_a_write_while_a_table_is_resized_poisons_nothing(strategy, writes_before, monkeypatch):
    """Another thread exchanges the weights before the cache copies them, or after that and before
    it resizes them."""
    first, second = torch.randn(2, 6, 5, 4)
    embed = partial(resample_pos_embeds, grid_sizes=[(3, 4)], mode="bicubic", strategy=strategy)
    want = embed(first)
    table = first.clone()
    embed(table)
    unseen = kept.unseen
    moments = ["copying", "resizing"]

    def write():  # called before anything is copied or built
        if moments and moments.pop(0) == writes_before:
            table.data.copy_(second)
        return unseen()

    with monkeypatch.context() as patch:
        patch.setattr(kept, "unseen", write)
        embed(table)
    assert moments == []
    assert torch.equal(table, second)

    table.data.copy_(first)
    for _ in range(3):
        assert relative(embed(table), want) <= 2e-6


SIZES = [(3, 5), (8, 2), (4, 4), (2, 7)]  # none is the table's
# How a model runs: None is called, the others are backends of the compiler.
BACKENDS = [None, "aot_eager", slow("eager"), slow("inductor")]
# An older compiler's graphs hold no operator, and keep nothing.
by_backend = pytest.mark.parametrize("backend", [None] if OLD_TORCH else BACKENDS)


def compiled(model, backend):
    return model if backend is None else torch.compile(model, backend=backend, dynamic=True)


@by_backend
@pytest.mark.parametrize("name", ["learned", "siglip2"])
@torch.no_grad()
def test_a_model_finds_what_is_kept_of_its_table_again_until_it_changes(name, backend, monkeypatch):
    # A table so small that it costs less to compare than to resample.
    model, twin = (build(name, depth=0, table_side=3).requires_grad_(False) for _ in range(2))
    inputs = [one_image(name, size) for size in SIZES]
    with running(model=model):
        run = compiled(model, backend)
        for given in inputs * 3:
            assert relative(run(given), twin(given)) <= 1e-5

        hold = []
        with monkeypatch.context() as patch:
            patch.setattr(torch, "embedding_bag", None)
            for number in range(40):
                hold.append(torch.zeros(number % 7))  # moves what a call puts into memory
                run(inputs[number % len(inputs)])

        # As the weights of a teacher do, in each step; inductor sees no version either.
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.data.mul_(1.5)
        for given in inputs * 3:
            assert relative(run(given), twin(given)) <= 1e-5


@by_backend
def test_a_table_that_trains_is_not_kept(backend):
    model = build("learned", depth=0, table_side=3)
    with running(model=model):
        run = compiled(model, backend)
        for size in SIZES * 3:
            given = one_image("learned", size)
            for _ in range(3):  # with one table, as for larger batches
                trained(model, given, run)
            assert finished_tables() == 0
