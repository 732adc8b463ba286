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
    """The rows of contenders whose runs take these seconds, the last one from then on; and who ran when."""
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

    def timed(work):
        start = now[0]
        work()
        return now[0] - start

    with patch("timm_naflex_fast.measure.bench.race.stopwatch", lambda device: timed):
        rows = run(race(*(contender(*pair) for pair in times.items())), rounds, **options)
    return [SimpleNamespace(**row) for row in rows], calls


def test_medians_ratios_and_spread_of_interleaved_rounds():
    # The first of each is the warm-up: as slow as a first call is, and not counted.
    times = {"stock": [9, 8.0], "matmul": [99, 1.0, 4.0, 2.0], "plain-add": [0.5]}
    rows, calls = raced(3, times)
    figures = "contender", "median_ms", "times_faster", "times_plain_add", "rounds"
    want = [("stock", 8000, 1, 16, 3), ("matmul", 2000, 4, 4, 3), ("plain-add", 500, 16, 1, 3)]
    assert [tuple(getattr(one, name) for name in figures) for one in rows] == want
    turns = [tuple(calls[i : i + 3]) for i in range(0, 12, 3)]
    assert len(calls) == 12 and {tuple(sorted(turn)) for turn in turns} == {tuple(sorted(times))} and len({*turns}) > 1
    # The middle half of the rounds over the median.
    ((one,), _) = raced(5, {"matmul": [9.0, 3.0, 4.0, 5.0, 6.0, 7.0]})
    assert one.median_ms == 5000 and one.spread == pytest.approx(2 / 5)
    ((one,), _) = raced(2, {"matmul": [1.0]})
    assert one.spread is one.times_faster is one.times_plain_add is one.peak_bytes is None


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    shares, times = [], {"stock": [20.0], "interpolate_cached": [0.5], "matmul": [0.1]}
    rows, calls = raced(10, times, budget=3.0, advance=shares.append)
    assert [one.rounds for one in rows] == [3, 6, 10] and sum(shares) == pytest.approx(1)
    assert [one.times_faster for one in rows] == pytest.approx([1, 40, 200])
    # After the warm-up, in the fourth, seventh and tenth of matmul's ten rounds: before or after it there.
    names = [name for name in calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_rounds_that_differ_too_much_are_run_again():
    shares = []
    rows, _ = raced(3, {"stock": [1.0], "matmul": [9.0, 1.0, 20.0, 20.0, 1.0]}, advance=shares.append)
    assert [one.rounds for one in rows] == [6, 6] and rows[1].median_ms == 1000 and sum(shares) == pytest.approx(1)


def test_tables(capsys):
    about = dict(tokens=12345, grids=7, table="16x16 bilinear", device="cpu")
    assert race(**about).title == "pos_embed siglip train, B=64, float32, 16x16 bilinear, 7 grids, 12,345 tokens, cpu"
    print_race("the title", [row(times_faster=40.0, times_plain_add=1.4, peak_bytes=1_000_000, about=about)])
    title, headings, cells, _ = capsys.readouterr().out.split("\n", 3)
    shown = ["contender", "median ms", "times faster than stock", "times one plain add", "extra peak MB", "rounds"]
    assert title == "the title" and re.split(" {2,}", headings) == shown
    assert cells.split() == ["matmul", "10.0", "40.0", "1.40", "1.0", "5"]


@pytest.mark.parametrize(
    ("timms", "ours", "spread", "shares", "rounds", "says"),
    [
        (50.0, 5.0, 0.03, None, 5, "90.0 %"),
        (5.0, 50.0, 0.03, None, 5, "-900.0 %"),
        (100.0, 98.0, 0.03, None, 5, "within noise"),
        (2.0, 1.0, None, None, 1, "too few rounds"),
        (1000.0, 958.0, 0.034, (0.051, 0.011), 5, "4.2 %"),
        (100.0, 110.6, 0.01, (0.051, 0.011), 5, "within noise"),  # its embeddings are faster: something else was slow
        (100.0, 56.4, 0.1, (0.296, 0.419), 5, "disturbed: run again"),  # more than timm's embeddings take
    ],
)
def test_the_time_saved_is_no_more_than_the_noise_allows(timms, ours, spread, shares, rounds, says, capsys):
    about = {"embeds_share": dict(zip(("stock", "matmul"), shares))} if shares else {}
    stock = row("stock", median_ms=timms, spread=spread and 0.01, about=about, rounds=rounds)
    print_race("", [stock, row(median_ms=ours, spread=spread, about=about, rounds=rounds)])
    _, headings, first, second, _ = capsys.readouterr().out.split("\n", 4)
    assert headings.endswith("  time saved") and first.endswith("  -") and second.endswith(f"  {says}")
