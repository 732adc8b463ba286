"""The bench: arithmetic on a fake clock, tables, sentences."""

import pytest

from tests.support.measured import row
from timm_naflex_fast.measure.bench.race import Race, Timed, print_race, run


class Clock:
    """Seconds that pass only when a contender runs or prepares."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def timed(self, work):
        start = self.now
        work()
        return self.now - start

    def contender(self, name, *seconds, **kwargs):
        left = list(seconds)

        def work(argument):
            assert argument == f"for {name}"
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        def prepare():
            self.now += 1000.0
            return f"for {name}"

        return Timed(name, work, prepare, **kwargs)


def race(*contenders, **about):
    return Race("pos_embed", "siglip", "train", 64, "float32", contenders, about)


def test_medians_and_ratios_on_a_fake_clock():
    clock = Clock()
    # The first of each is the warm-up: as slow as a first call is, and not counted.
    runners = [
        clock.contender("stock", 9, 8.0),
        clock.contender("matmul", 99, 1.0, 4.0, 2.0),
        clock.contender("plain-add", 0.5),
    ]
    stock, matmul, plain = run(race(*runners), 3, timed=clock.timed)
    assert [r.contender for r in (stock, matmul, plain)] == ["stock", "matmul", "plain-add"]
    assert (stock.median_ms, matmul.median_ms, plain.median_ms) == (8000, 2000, 500)
    assert (stock.times_faster, matmul.times_faster, plain.times_faster) == (1, 4, 16)
    assert (stock.times_plain_add, matmul.times_plain_add, plain.times_plain_add) == (16, 4, 1)
    assert [r.rounds for r in (stock, matmul, plain)] == [3, 3, 3]


def test_rounds_are_interleaved():
    clock = Clock()
    names = ["stock", "matmul", "plain-add"]
    run(race(*(clock.contender(n, 1.0) for n in names)), 4, timed=clock.timed)
    turns = [clock.calls[i : i + 3] for i in range(0, 15, 3)]
    assert len(clock.calls) == 15
    assert all(sorted(turn) == sorted(names) for turn in turns) and len({tuple(turn) for turn in turns}) > 1


def test_the_spread_is_the_middle_half_of_the_rounds_over_the_median():
    clock = Clock()
    (row,) = run(race(clock.contender("stock", 9.0, 3.0, 4.0, 5.0, 6.0, 7.0)), 5, timed=clock.timed)
    assert row.median_ms == 5000 and row.spread == pytest.approx(2 / 5)
    assert run(race(clock.contender("stock", 1.0)), 2, timed=clock.timed)[0].spread is None


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    clock = Clock()
    runners = [
        clock.contender("stock", 20.0),
        clock.contender("interpolate_cached", 0.5),
        clock.contender("matmul", 0.1),
    ]
    shares = []
    rows = run(race(*runners), 10, budget=3.0, timed=clock.timed, advance=shares.append)
    assert [r.rounds for r in rows] == [3, 6, 10] and sum(shares) == pytest.approx(1)
    assert [r.times_faster for r in rows] == pytest.approx([1, 40, 200])
    # After the warm-up, in the fourth, seventh and tenth of matmul's ten rounds: before or after it there.
    names = [name for name in clock.calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_no_baseline_no_ratio():
    clock = Clock()
    (only,) = run(race(clock.contender("matmul", 1.0)), 1, timed=clock.timed)
    assert only.times_faster is None and only.times_plain_add is None and only.peak_bytes is None


def test_tables(capsys):
    about = dict(tokens=12345, grids=7, table="16x16 bilinear", device="cpu")
    assert race(**about).title == "pos_embed siglip train, B=64, float32, 16x16 bilinear, 7 grids, 12,345 tokens, cpu"
    print_race("the title", [row(times_faster=40.0, times_plain_add=1.4, peak_bytes=1_000_000, about=about)])
    text = capsys.readouterr().out
    assert text.startswith("the title\n")
    for cell in ("matmul", "10.0", "40.0", "1.40", "1.0", "5"):
        assert cell in text
    assert "extra peak MB" in text and "rounds" in text


def test_rounds_that_differ_too_much_are_run_again():
    clock = Clock()
    runners = [clock.contender("stock", 1.0), clock.contender("matmul", 9.0, 1.0, 20.0, 20.0, 1.0)]
    rows = run(race(*runners), 3, timed=clock.timed)
    assert [row.rounds for row in rows] == [6, 6] and rows[1].median_ms == 1000
