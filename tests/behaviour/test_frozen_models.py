"""Frozen models, eager and compiled: what is kept of their tables is found again, and stays small."""

import pytest
import torch

from tests.support import tiny_siglip2
from tests.support.checks import slow
from tests.support.oracles import finished_tables, relative, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast.resampling import kept, sparse

HOW = ["called", "eager", "aot_eager", slow("inductor")]
SIZES = [(3, 5), (8, 2), (4, 4), (2, 7)]  # none is the table's


def called_or_compiled(model, how):
    return model if how == "called" else torch.compile(model, backend=how, dynamic=True)


@pytest.fixture
def sums(monkeypatch):
    """The sums that ran, one entry each."""
    ran = []
    run = sparse.SparseSum.__call__

    def counted(self, source):
        ran.append(len(source))
        return run(self, source)

    monkeypatch.setattr(sparse.SparseSum, "__call__", counted)
    return ran


def check_steady_calls(sums, call, inputs):
    """Later calls run no sum, give the same result, and put nothing into the store."""
    kept.clear_all()
    first = [call(given) for given in inputs]
    assert sums
    for given in inputs * 2:
        call(given)
    sums.clear()
    entries = len(kept._entries), kept._nbytes, finished_tables()
    hold = []
    for number in range(40):
        hold.append(torch.zeros(number % 7))  # moves what a call puts into memory
        number %= len(inputs)
        assert relative(call(inputs[number]), first[number]) <= 1e-6
    assert sums == []
    assert (len(kept._entries), kept._nbytes, finished_tables()) == entries
    assert entries[2] == len(inputs)


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_a_naflexvit_finds_the_embeddings_of_its_frozen_table_again(how, sums):
    # A table so small that it costs less to compare than to resample.
    model = small_vit(pos_embed_grid_size=(3, 3), depth=1).requires_grad_(False)
    batches = [vit_batch([size]) for size in SIZES]
    with running(model=model):
        check_steady_calls(sums, called_or_compiled(model, how), batches)


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_a_siglip2_of_transformers_finds_them_again(how, sums):
    pytest.importorskip("transformers")
    model = tiny_siglip2.tower(9, num_hidden_layers=1).requires_grad_(False)
    embed = called_or_compiled(model.embeddings, how)
    patches = torch.randn(1, 20, 3 * 16 * 16)
    inputs = [torch.tensor([size]) for size in SIZES]
    with running(library="transformers"):
        check_steady_calls(sums, lambda sizes: embed(patches, sizes), inputs)


@pytest.mark.parametrize("how", HOW)
def test_a_table_that_trains_is_not_kept(how, sums):
    model = small_vit(pos_embed_grid_size=(3, 3), depth=0)
    batches = [vit_batch([size]) for size in SIZES]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with running(model=model):
        run = called_or_compiled(model, how)

        def step(batch):
            optimizer.zero_grad()
            run(batch).square().sum().backward()
            optimizer.step()

        for batch in batches:
            step(batch)
        entries = len(kept._entries), kept._nbytes
        sums.clear()
        for batch in batches * 3:
            step(batch)
            run(batch).square().sum().backward()  # twice with one table, as for larger batches
    assert len(sums) >= 12 * 4
    assert (len(kept._entries), kept._nbytes) == entries
    assert finished_tables() == 0


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_a_table_that_changes_unseen_is_never_out_of_date(how):
    """As the weights of a teacher do, in each step; inductor sees no version either."""
    model = small_vit(pos_embed_grid_size=(3, 3), depth=0).requires_grad_(False)
    batch = vit_batch([(3, 5), (8, 2)])
    run = called_or_compiled(model, how)
    for number in range(12):
        if number % 3 == 2:
            model.embeds.pos_embed.data.mul_(1.5)
        want = model(batch)
        with running(model=model):
            assert relative(run(batch), want) <= 1e-5
