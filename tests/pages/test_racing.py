"""Races of benchmarks/: rounds on a fake clock, and the embeddings' share of a step."""

from contextlib import ExitStack

import pytest
import races
import racing
import whole_models
from racing import Race, Timed

from timm_naflex_fast import status
from timm_naflex_fast.commands.measure.models import load_model


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them(monkeypatch):
    clock = [0.0]
    calls = []

    def contender(name, seconds):
        def work(argument):
            calls.append(name)
            clock[0] += seconds

        def prepare():
            clock[0] += 1000.0  # does not count

        return Timed(name, work, prepare)

    times = {"stock": 20.0, "grid": 0.5, "fast": 0.125}
    contenders = tuple(contender(name, seconds) for name, seconds in times.items())
    monkeypatch.setattr(racing, "now", lambda: clock[0])
    rows = racing.run(Race("rope", "axial", "infer", 1, "float32", contenders), 10, budget=3.0)
    assert [row["median_ms"] for row in rows] == [20000, 500, 125]
    assert [row["rounds"] for row in rows] == [3, 6, 10]
    # After the warm-up stock runs in the fourth, seventh and tenth of the fast one's ten rounds,
    # before or after it.
    names = [name for name in calls[3:] if name != "grid"]
    before = [names[:place].count("fast") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_the_share_of_the_embeddings_has_their_forward_and_backward(monkeypatch):
    small = dict(embed_dim=32, depth=1, num_heads=2, num_classes=5)
    model, _ = load_model("naflexvit_base_patch16_gap", random_weights=True, **small)
    ticks = iter(range(1000))
    monkeypatch.setattr(whole_models, "now", lambda: next(ticks))
    with ExitStack() as stack:
        race = whole_models.race(model, "siglip", [(8, 9)], "train", ["stock"], stack)
        (row,) = racing.run(race, 2)
    # Start, embeddings in and out, their gradient known, end of the backward, end of the step.
    assert next(ticks) == 18  # of a warm-up and two rounds
    assert row["about"]["embeds_share"] == {"stock": 2 / 5}


@pytest.mark.parametrize("phase", ["train", "first", "frozen"])
def test_in_the_race_of_patch_kernels_ours_is_timed_against_timms(phase):
    with ExitStack() as stack:
        race = races._patch_race((16, 16), (8, 8), "conv", phase, 2, stack)
        for contender in race.contenders:
            argument = contender.prepare()  # held: it keeps the module and its choice
            contender.run(argument)
            has_run = ("patch_embed", "matmul") in status().calls
            assert has_run == (contender.name == "matmul")
