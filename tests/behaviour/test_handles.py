"""Handles end what their own ``enable()`` has chosen, in any order; the newest that is left holds."""

import copy
import gc
import itertools
import sys
import threading
import tracemalloc

import pytest
import timm

from tests.support.oracles import embed, is_pristine, small_vit, uses
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import install, settings
from timm_naflex_fast.patching.settings import STOCK

MODES = ("grid_sample", "matmul", "interpolate_cached")


def in_force(model):
    """The mode that the newest of what is left asks for, by what runs."""
    return uses(model) if status().replaced else "stock"


@pytest.mark.parametrize("for_one", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_handles_may_be_left_in_any_order(order, for_one):
    model = small_vit()
    handles = {i: enable(mode, model=model if for_one else None) for i, mode in enumerate(MODES)}
    for i in order:
        assert in_force(model) == MODES[max(handles)]
        handles.pop(i).restore()
    assert in_force(model) == "stock" and is_pristine()
    assert status().models == () and settings.ATTRIBUTE not in model.embeds.__dict__


def test_handles_for_every_model_and_for_one_overlap():
    model, other = small_vit(), small_vit()
    everywhere = enable("interpolate_cached")
    mine = enable("grid_sample", model=model)
    everywhere.restore()
    assert (in_force(model), uses(other)) == ("grid_sample", "stock")
    again = enable("matmul")
    mine.restore()
    assert uses(model) == uses(other) == "matmul"
    again.restore()
    assert is_pristine()


def test_a_plain_enable_inside_stays_and_one_outside_comes_back():
    with enable("grid_sample"):
        enable("matmul")
    assert status().flags.pos_embed == "matmul"
    with enable("stock"):
        assert is_pristine()
    assert status().flags.pos_embed == "matmul" and not is_pristine()
    disable()


def test_nothing_comes_back_after_disable():
    model = small_vit()
    handles = [enable("grid_sample"), enable("matmul", model=model)]
    disable()
    enable("interpolate_cached")
    for handle in handles:
        handle.restore()
    assert status().flags.pos_embed == uses(model) == "interpolate_cached"
    disable()


@pytest.mark.parametrize("left", ["by with", "by disable"])
def test_a_copy_made_inside_ends_with_the_handle(left):
    model, other = small_vit(), small_vit()
    with enable("grid_sample", model=model):
        copies = [copy.deepcopy(model), timm.utils.ModelEmaV3(model).module, copy.deepcopy(copy.deepcopy(model))]
        assert [uses(m) for m in copies] == ["grid_sample"] * 3
        if left == "by disable":
            disable()
    assert [uses(m) for m in copies] == ["stock"] * 3 and is_pristine() and status().models == ()
    with enable("matmul"):
        assert [uses(m) for m in (*copies, other)] == ["matmul"] * 4
    with enable("interpolate_cached", model=copies[0]):
        assert [uses(m) for m in (*copies, model)] == ["interpolate_cached"] + ["stock"] * 3


def test_the_copy_keeps_what_its_model_loses():
    model = small_vit()
    with enable("grid_sample", model=model):
        average = copy.deepcopy(model)
        disable(model)
        assert (uses(model), uses(average)) == ("stock", "grid_sample")
        del model
        gc.collect()
        assert uses(average) == "grid_sample" and [own.pos_embed for own in status().models] == ["grid_sample"]
    assert is_pristine() and uses(average) == "stock"


def test_what_the_model_hides_may_hold_in_its_copy():
    model = small_vit()
    enable("grid_sample", model=model)
    average = copy.deepcopy(model)
    enable("stock", model=model)
    status()
    assert (uses(model), uses(average)) == ("stock", "grid_sample")
    disable()


def test_a_model_inside_another():
    model = small_vit()
    with enable("grid_sample", model=model.embeds), enable("matmul", model=model):
        assert uses(model) == "matmul" and [own.pos_embed for own in status().models] == ["matmul"]
    inner = enable("grid_sample", model=model.embeds)
    outer = enable("matmul", model=model)
    inner.restore()
    assert uses(model) == "matmul"
    outer.restore()
    assert is_pristine()


def test_counts_belong_to_each_enable():
    model = small_vit()
    first = enable("matmul")
    embed(model)
    second = enable("grid_sample")
    embed(model), embed(model)
    first.restore()
    assert status().calls == {("pos_embed", "grid_sample"): 2}
    embed(model)
    assert status().calls == {("pos_embed", "grid_sample"): 3}
    disable(model)
    embed(model)
    assert status().calls == {("pos_embed", "grid_sample"): 3, ("pos_embed", "stock"): 1}
    second.restore()
    disable()
    assert status().calls == {}


@pytest.mark.parametrize("for_one", [pytest.param(False, marks=pytest.mark.slow), True])
def test_many_switches_leave_nothing(for_one):
    model = small_vit() if for_one else None

    def switch(times):
        for _ in range(times):
            enable("grid_sample", model=model)
            enable("stock", model=model)

    switch(100)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    switch(5 if sys.gettrace() else 500)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000 and len(install._enabled) <= 3 and len(install._holders) <= 10
    disable()
    assert is_pristine() and not install._enabled and not install._holders


def test_overlapping_requests_in_threads():
    model, go, wrong = small_vit(), threading.Barrier(4), []

    def request(mode, seed):
        go.wait()
        for _ in range(40):
            with enable(mode, model=model if seed % 2 else None):
                copied = copy.deepcopy(model)
                ran = {k for k in status().flags.__dict__.values()} | {own.pos_embed for own in status().models}
                if not ran & set(MODES):
                    wrong.append(ran)
                embed(copied)

    threads = [threading.Thread(target=request, args=(MODES[i % 3], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and is_pristine() and status().flags == STOCK and status().models == ()


def test_a_snapshot_brings_back_models_libraries_and_handles():
    model, other = small_vit(), small_vit()
    everywhere = enable("interpolate_cached")
    mine = enable("grid_sample", model=model)
    put_back = install.snapshot()
    disable()
    enable("matmul")
    leaked = enable("matmul", model=other)
    put_back()
    assert (uses(model), uses(other)) == ("grid_sample", "interpolate_cached") and len(status().models) == 1
    leaked.restore()
    mine.restore()
    assert uses(model) == "interpolate_cached"
    everywhere.restore()
    assert is_pristine()


def test_a_handle_that_was_left_is_not_entered_again():
    handle = enable()
    with handle:
        pass
    with pytest.raises(RuntimeError, match=r"has ended; call enable\(\) again"), handle:
        pass
