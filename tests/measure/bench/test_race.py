"""Races: arithmetic on a fake clock, tables."""

import re
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.support.measured import row
from timm_naflex_fast.measure.bench.race import Race, Timed, print_race, run


def race(*contenders, **about):
    return Race("pos_embed", "siglip", "train", 64, "float32", contenders, about)


def raced(rounds, times, **options):
    """The rows of contenders whose runs take these seconds, the last one from then on; and who ran
    when."""
    clock = [0.0]
    calls = []

    def contender(name, seconds):
        left = chain(seconds, repeat(seconds[-1]))

        def work(argument):
            calls.append(argument)
            clock[0] += next(left)

        def prepare():
            clock[0] += 1000.0  # does not count
            return name

        return Timed(name, work, prepare)

    contenders = [contender(name, seconds) for name, seconds in times.items()]
    with patch("timm_naflex_fast.measure.bench.race.now", lambda: clock[0]):
        rows = run(race(*contenders), rounds, **options)
    return [SimpleNamespace(**row) for row in rows], calls


# The first time of each contender is its warm-up: as slow as a first call is, and not counted.


def test_medians_and_ratios():
    times = {"stock": [9, 8.0], "matmul": [99, 1.0, 4.0, 2.0], "plain-add": [0.5]}
    rows, _ = raced(3, times)
    found = [(one.contender, one.median_ms, one.times_faster, one.rounds) for one in rows]
    assert found == [("stock", 8000, 1, 3), ("matmul", 2000, 4, 3), ("plain-add", 500, 16, 3)]


def test_each_round_runs_each_contender_once_in_changing_order():
    times = {"stock": [1.0], "matmul": [1.0], "plain-add": [1.0]}
    _, calls = raced(3, times)
    assert len(calls) == 12  # with the warm-up
    turns = [tuple(calls[i : i + 3]) for i in range(0, 12, 3)]
    assert {tuple(sorted(turn)) for turn in turns} == {tuple(sorted(times))}
    assert len({*turns}) > 1


@pytest.mark.parametrize(
    ("rounds", "median", "low", "high"),
    # Of ten rounds the fastest and the slowest are left out: the second to the ninth hold the
    # median in 98 % of cases.
    [(3, 2000, 1000, 3000), (10, 5500, 2000, 9000)],
)
def test_the_range_of_the_median(rounds, median, low, high):
    seconds = [0.0, *map(float, range(1, rounds + 1))]
    ((one,), _) = raced(rounds, {"matmul": seconds})
    assert (one.median_ms, one.low_ms, one.high_ms) == (median, low, high)
    assert one.spread == (high - low) / 2 / median


def test_two_rounds_have_no_spread_and_no_baseline_no_ratio():
    ((one,), _) = raced(2, {"matmul": [1.0]})
    assert one.spread is None and one.times_faster is None


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    shares = []
    times = {"stock": [20.0], "interpolate_cached": [0.5], "matmul": [0.1]}
    rows, calls = raced(10, times, budget=3.0, advance=shares.append)
    assert [one.rounds for one in rows] == [3, 6, 10]
    assert [one.times_faster for one in rows] == pytest.approx([1, 40, 200])
    assert sum(shares) == pytest.approx(1)
    # After the warm-up stock runs in the fourth, seventh and tenth of matmul's ten rounds, before
    # or after it.
    names = [name for name in calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_the_title():
    about = dict(tokens=12345, grids=7, table="16x16 bilinear", device="cpu")
    title = "pos_embed siglip train, B=64, float32, 16x16 bilinear, 7 grids, 12,345 tokens, cpu"
    assert race(**about).title == title


def test_the_table_has_columns_for_what_was_measured(capsys):
    about = dict(counted={"matmul": {"graphs": 0}}, embeds_share={"matmul": 0.25})
    print_race("the title", [row(about=about)])
    title, headings, cells, _ = capsys.readouterr().out.split("\n", 3)
    assert title == "the title"
    shown = ["mode", "median ms", "rounds", "share of embeddings", "graphs"]
    assert re.split(" {2,}", headings) == shown
    assert re.split(" {2,}", cells) == ["matmul", "10.0", "5", "25.0 %", "0"]


@pytest.mark.parametrize(
    ("suite", "timms", "ours", "spread", "says"),
    [
        ("pos_embed", 50.0, 5.0, 0.03, "10.0 (9.42 to 10.6)"),
        ("pos_embed", 5.0, 50.0, 0.03, "0.100 (0.094 to 0.106)"),
        ("pos_embed", 100.0, 60.0, 0.3, "cannot be told (0.897 to 3.10)"),
        ("pos_embed", 2.0, 1.0, None, "cannot be told (too few rounds)"),
        ("model", 100.0, 90.0, 0.01, "1.11 (1.09 to 1.13)"),
        ("model", 100.0, 90.0, 0.03, "cannot be told (1.05 to 1.18)"),  # not known within 2 %
        ("model", 100.0, 99.0, 0.01, "cannot be told (0.990 to 1.03)"),
    ],
)
def test_a_ratio_is_told_only_where_the_ranges_of_the_medians_are_apart(
    suite, timms, ours, spread, says, capsys
):
    def measured(name, ms):
        share = spread or 0
        limits = dict(low_ms=ms * (1 - share), high_ms=ms * (1 + share))
        return row(name, suite=suite, median_ms=ms, spread=spread, **limits)

    print_race("", [measured("stock", timms), measured("matmul", ours)])
    _, headings, first, second, _ = capsys.readouterr().out.split("\n", 4)
    assert headings.endswith("  times faster than stock")
    assert first.endswith("  -")
    assert second.endswith(f"  {says}")
