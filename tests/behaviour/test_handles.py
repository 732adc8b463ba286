"""Handles end what their own ``enable()`` has chosen, in any order; the newest that is left
holds."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.checks import during, slow
from tests.support.oracles import embed, is_pristine, small_vit, uses, vit_batch
from tests.support.running import ran, running
from timm_naflex_fast import disable, enable, status

MODES = ("grid_sample", "matmul", "interpolate_cached")
FORMS = {  # what a user may hand over as a model
    "model": lambda model: model,
    "part": lambda model: model.embeds,
    # As open_clip's.
    "wrapper": lambda model: torch.nn.ModuleDict({"trunk": torch.nn.Sequential(model)}),
}


class Program:
    """A random program; beside it the rule: the modes that hold for all and for each, newest last.

    Each mode stands under the number of the step that chose it.
    """

    ACTS = ("enable", "enable_one", "leave", "leave", "copy", "disable_one", "disable")

    def __init__(self, data):
        self.draw = lambda choices: data.draw(st.sampled_from([*choices]))
        self.models = [small_vit(depth=0)]
        self.everywhere = {}
        self.own = [{}]  # by model
        self.handles = {}

    def run(self, step):
        self.step = step
        self.number = self.draw(range(len(self.models)))
        getattr(self, self.draw(self.ACTS))()
        for model, modes in zip(self.models, self.own):
            holding = modes or self.everywhere or {0: "stock"}
            assert uses(model) == [*holding.values()][-1]

    def enable(self):
        self.choose(self.everywhere)

    def enable_one(self):
        form = FORMS[self.draw(FORMS)]
        self.choose(self.own[self.number], model=form(self.models[self.number]))

    def choose(self, modes, **options):
        mode = self.draw([*MODES, "stock"])
        modes[self.step] = mode
        handle = enable(mode, **options)
        if self.draw([True, False]):  # else nobody can leave it
            self.handles[self.step] = handle

    def leave(self):
        if not self.handles:
            return
        left = self.draw(sorted(self.handles))
        self.handles.pop(left).restore()
        for modes in (self.everywhere, *self.own):
            modes.pop(left, None)

    def copy(self):
        if len(self.models) < 3:
            self.models.append(copy.deepcopy(self.models[self.number]))
            self.own.append(dict(self.own[self.number]))

    def disable_one(self):
        disable(self.models[self.number])
        newest = [*self.everywhere.values()][-1:]
        self.own[self.number] = {} if newest in ([], ["stock"]) else {self.step: "stock"}

    def disable(self):
        disable()
        self.everywhere = {}
        self.own = [{} for _ in self.models]


@hypothesis.given(st.data())
def test_the_newest_that_is_left_holds_for_each_model_and_its_copies(data):
    program = Program(data)
    try:
        for step in range(data.draw(st.integers(1, 10))):
            program.run(step)
    finally:
        disable()
    assert is_pristine()
    assert status().models == ()
    assert vars(program.models[0].embeds).keys() == vars(small_vit(depth=0).embeds).keys()


@pytest.mark.usefixtures("clean")
def test_a_copy_has_its_models_mode_until_the_models_handle_is_left():
    """As the moving average of a model's weights."""
    enable("matmul")
    model = small_vit(depth=0)
    handle = enable("grid_sample", model=model)
    average = copy.deepcopy(model)
    assert uses(average) == "grid_sample"
    handle.restore()
    assert uses(average) == uses(model) == "matmul"


@pytest.mark.usefixtures("clean")
def test_checkpoints_and_pickles_hold_nothing_of_ours():
    model = small_vit()
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    enable("grid_sample", model=model)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    data = pickle.dumps(model)
    assert b"timm_naflex_fast" not in data
    loaded = pickle.loads(data)
    assert uses(loaded) == "stock"
    enable("matmul", model=loaded)
    assert uses(loaded) == "matmul"


@pytest.fixture
def pool():
    """Four threads, each of which may run between any two lines of another."""
    with (
        during(sys.setswitchinterval, 1e-5, after=sys.getswitchinterval()),
        ThreadPoolExecutor(4) as threads,
    ):
        yield threads


@ran("grid_sample")
def test_overlapping_requests_in_threads(pool):
    """None of them sees half of a patch."""
    model = small_vit(depth=0)
    results = [embed(model)]
    with enable("grid_sample"):
        results.append(embed(model))

    def serve(seed):
        for _ in range(15):
            with enable(MODES[seed % 3], model=model if seed % 2 else None):
                copied = copy.deepcopy(model)
                now = status()
                assert {now.flags.pos_embed, *(own.pos_embed for own in now.models)} & {*MODES}
                got = embed(copied)
                assert any(torch.allclose(got, want, atol=1e-5) for want in results)

    list(pool.map(serve, range(4)))
    assert is_pristine()
    assert status().flags.pos_embed == "stock"
    assert status().models == ()


def test_a_handle_that_was_left_is_not_entered_again():
    everywhere = enable()
    everywhere.restore()
    assert is_pristine()
    with pytest.raises(RuntimeError, match=r"has ended; call enable\(\) again"), everywhere:
        pass


@pytest.mark.usefixtures("clean")
def test_what_nobody_can_end_is_forgotten_when_a_newer_one_hides_it():
    """A service that chooses for each request, and drops the handles."""
    model = small_vit(depth=0)
    other = enable("interpolate_cached", model=small_vit(depth=0))
    sizes = set()
    for _ in range(20):
        for mode in MODES:
            enable(mode), enable(mode, model=model)
            with enable("stock", model=model):
                assert uses(model) == "stock"
            assert uses(model) == mode
            sizes.add(len(pickle.dumps(model)))
    assert len(sizes) == 1
    other.restore()


def embedded(model, seed):
    return embed(model, vit_batch([(3, 4), (5, 2)], seed=seed)), status().calls


@pytest.mark.parametrize("method", ["fork", slow("spawn")])
def test_models_in_dataloader_workers(method):
    model = small_vit().requires_grad_(False)
    want = [embedded(model, seed)[0] for seed in range(4)]
    with (
        enable("grid_sample"),
        running("interpolate_cached", model=model),
    ):  # a spawned process has timm as it came
        embed(model), embed(model)
        how = dict(
            num_workers=1, collate_fn=partial(embedded, model), multiprocessing_context=method
        )
        for (got, calls), item in zip(DataLoader(range(4), None, **how), want, strict=True):
            torch.testing.assert_close(got, item, atol=1e-6, rtol=0)
            assert (("pos_embed", "interpolate_cached") in calls) == (method == "fork")
