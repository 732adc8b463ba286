"""The races of lab/benchmarks: who is timed against whom, and what a call is said to enter."""

from contextlib import ExitStack
from functools import partial

import pytest
from torch.nn.modules.module import register_module_forward_hook

from lab.benchmarks import calls, races, whole_models
from tests.support.running import ran
from timm_naflex_fast import status
from timm_naflex_fast.commands.measure import racing
from timm_naflex_fast.commands.measure.models import load_model


@pytest.mark.parametrize("phase", ["train", "first", "frozen"])
def test_in_the_race_of_patch_kernels_ours_is_timed_against_timms(phase):
    with ExitStack() as stack:
        sides = races._patch_sides((16, 16), (8, 8), phase, stack)
        for name, ready in sides.items():
            step = ready()  # held: it keeps the module and its choice
            step()
            has_run = ("patch_embed", "matmul") in status().calls
            assert has_run == (name == "matmul")


@ran("matmul")
def test_the_embeddings_are_a_share_of_each_step(monkeypatch):
    """By a clock that ticks whenever a module has run."""
    have_run = []
    monkeypatch.setattr(racing, "now", lambda: len(have_run))
    monkeypatch.setattr(whole_models, "BATCH", 1)
    small = partial(load_model, depth=1, embed_dim=32, num_heads=2)
    monkeypatch.setattr(whole_models, "load_model", small)
    with register_module_forward_hook(lambda *call: have_run.append(call)):
        train, infer = whole_models.races("naflexvit_base_patch16_gap", ["siglip"])
    assert [row["contender"] for row in train] == ["stock", "matmul"]
    stock, *_ = (*train, *infer)
    # Of the embeddings four modules run.
    assert stock["about"]["embeds_share"]["stock"] == 4e3 / stock["median_ms"] < 0.2


@ran("matmul", "interpolate_cached")
@pytest.mark.parametrize("case", calls.CASES, ids=lambda case: case.what)
def test_each_kind_of_call_is_timed_in_timms_way_and_in_ours(case, monkeypatch):
    few = case._replace(channels=4, grids=case.grids[:9])
    if case.grids is calls.NEW:
        monkeypatch.setattr(calls, "NEW", few.grids)
    times = calls.time_case(few, 2)
    assert [*times] == ["stock", "matmul", "interpolate_cached"]
    assert min(times.values()) > 0


def test_what_a_call_enters_is_counted_in_this_package_alone():
    assert calls.entered(partial(sorted, [3, 1])) == {"code objects": 0, "files": 0}
    status()
    assert calls.entered(status)["files"] > 0
