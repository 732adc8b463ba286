"""The bench: arithmetic on a fake clock, tables."""

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
    now, calls = [0.0], []

    def contender(name, seconds):
        left = chain(seconds, repeat(seconds[-1]))

        def work(argument):
            calls.append(argument)
            now[0] += next(left)

        def prepare():
            now[0] += 1000.0  # does not count
            return name

        return Timed(name, work, prepare)

    with patch("timm_naflex_fast.measure.bench.race.now", lambda: now[0]):
        rows = run(race(*(contender(*pair) for pair in times.items())), rounds, **options)
    return [SimpleNamespace(**row) for row in rows], calls


def test_medians_ratios_and_ranges_of_interleaved_rounds():
    # The first of each is the warm-up: as slow as a first call is, and not counted.
    times = {"stock": [9, 8.0], "matmul": [99, 1.0, 4.0, 2.0], "plain-add": [0.5]}
    rows, calls = raced(3, times)
    figures = "contender", "median_ms", "times_faster", "times_plain_add", "rounds"
    want = [("stock", 8000, 1, 16, 3), ("matmul", 2000, 4, 4, 3), ("plain-add", 500, 16, 1, 3)]
    assert [tuple(getattr(one, name) for name in figures) for one in rows] == want
    turns = [tuple(calls[i : i + 3]) for i in range(0, 12, 3)]
    assert (
        len(calls) == 12
        and {tuple(sorted(turn)) for turn in turns} == {tuple(sorted(times))}
        and len({*turns}) > 1
    )
    assert (rows[1].low_ms, rows[1].high_ms, rows[1].spread) == (
        1000,
        4000,
        0.75,
    )  # half the range over the median
    # Of ten rounds the fastest and the slowest are left out: the second to the ninth hold the
    # median in 98 % of cases.
    ((one,), _) = raced(10, {"matmul": [0.0, *map(float, range(1, 11))]})
    assert (one.median_ms, one.low_ms, one.high_ms) == (5500, 2000, 9000)
    ((one,), _) = raced(2, {"matmul": [1.0]})
    assert one.spread is one.times_faster is one.times_plain_add is None


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    shares, times = [], {"stock": [20.0], "interpolate_cached": [0.5], "matmul": [0.1]}
    rows, calls = raced(10, times, budget=3.0, advance=shares.append)
    assert [one.rounds for one in rows] == [3, 6, 10] and sum(shares) == pytest.approx(1)
    assert [one.times_faster for one in rows] == pytest.approx([1, 40, 200])
    # After the warm-up, in the fourth, seventh and tenth of matmul's ten rounds: before or after it
    # there.
    names = [name for name in calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_tables(capsys):
    about = dict(
        tokens=12345,
        grids=7,
        table="16x16 bilinear",
        device="cpu",
        counted={"matmul": {"graphs": 0}},
    )
    assert (
        race(**about).title
        == "pos_embed siglip train, B=64, float32, 16x16 bilinear, 7 grids, 12,345 tokens, cpu"
    )
    print_race("the title", [row(times_plain_add=1.4, about=about)])
    title, headings, cells, _ = capsys.readouterr().out.split("\n", 3)
    shown = ["contender", "median ms", "rounds", "times one plain add", "graphs"]
    assert title == "the title" and re.split(" {2,}", headings) == shown
    assert cells.split() == ["matmul", "10.0", "5", "1.40", "0"]


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
        low, high = ms * (1 - (spread or 0)), ms * (1 + (spread or 0))
        return row(name, suite=suite, median_ms=ms, low_ms=low, high_ms=high, spread=spread)

    print_race("", [measured("stock", timms), measured("matmul", ours)])
    _, headings, first, second, _ = capsys.readouterr().out.split("\n", 4)
    assert (
        headings.endswith("  times faster than stock")
        and first.endswith("  -")
        and second.endswith(f"  {says}")
    )
