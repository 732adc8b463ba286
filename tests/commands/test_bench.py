"""The bench: arithmetic on a fake clock, tables, sentences."""

import pytest
from measured import row

from timm_naflex_fast.measure.bench.conclude import conclude
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
    rows = run(race(*runners), 10, budget=3.0, timed=clock.timed)
    assert [r.rounds for r in rows] == [3, 6, 10]
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


def test_columns_without_a_figure_are_left_out(capsys):
    about = {"embeds_share": {"stock": 0.0214, "matmul": 0.003}}
    print_race("", [row("stock", times_faster=1.0, about=about), row(times_faster=1.1, about=about)])
    text = capsys.readouterr().out
    assert "2.1 %" in text and "0.3 %" in text and "plain add" not in text and "peak" not in text


def test_rounds_that_differ_too_much_are_run_again():
    clock = Clock()
    runners = [clock.contender("stock", 1.0), clock.contender("matmul", 9.0, 1.0, 20.0, 20.0, 1.0)]
    rows = run(race(*runners), 3, timed=clock.timed)
    assert [row.rounds for row in rows] == [6, 6] and rows[1].median_ms == 1000


@pytest.mark.parametrize("costs", [(20.0, 0.5, 0.01), (1.0, 1.0, 1.0), (0.001, 5.0, 0.2)])
def test_the_time_left_is_right_within_a_factor_of_two_once_each_has_run(costs):
    clock, spent, seen = Clock(), [], []
    runners = [clock.contender(name, cost) for name, cost in zip(("stock", "matmul", "plain-add"), costs)]

    def timed(work):
        spent.append(clock.timed(work))
        return spent[-1]

    run(race(*runners), 10, budget=3.0, timed=timed, advance=lambda share: seen.append((sum(spent), share)))
    assert sum(share for _, share in seen) == pytest.approx(1)
    done, total = 0.0, sum(spent)
    for now, share in seen[:-2]:
        done += share
        if now >= sum(costs):
            left = now / done * (1 - done)
            assert 0.5 <= (left + 0.1 * total) / (total - now + 0.1 * total) <= 2


def step(contender, phase, ms, spread=0.01, shares=None, suite="model", rounds=5):
    about = {"model": "m", "embeds_share": shares} if shares else {}
    figures = dict(suite=suite, phase=phase, batch=8, median_ms=ms, spread=spread, about=about, rounds=rounds)
    return row(contender, **figures)


def test_the_closing_sentence_of_a_model():
    shares = {"stock": 0.051, "matmul": 0.011}
    rows = [step("stock", "train", 1000.0, shares=shares), step("matmul", "train", 958.0, 0.034, shares)]
    rows += [step("stock", "infer", 100.0, shares=shares), step("matmul", "infer", 110.6, shares=shares)]
    (said,) = conclude(rows)
    assert said == (
        "On this machine, for m with 8 images (siglip, float32), `matmul` saves 4.2 % of a training step (rounds of "
        "the same code differ by 3.4 %, embeddings 5.1 -> 1.1 % of the step); makes no measurable difference to an "
        "inference (rounds of the same code differ by 1.0 %, embeddings 5.1 -> 1.1 % of the step)."
    )
    impossible = {"stock": 0.296, "matmul": 0.419}
    (said,) = conclude(
        [step("stock", "train", 100.0, shares=impossible), step("matmul", "train", 56.4, 0.1, impossible)]
    )
    assert "`matmul` was disturbed in a training step (a saving of 43.6 % is more than timm's embeddings take" in said
    (few,) = conclude([step(name, "train", 2.0, None, shares, rounds=1) for name in ("stock", "matmul")])
    assert "no measurable difference to a training step (too few rounds to tell the noise" in few


def test_the_closing_sentences_without_a_model():
    rows = [step("stock", "train", 50.0, suite="pos_embed"), step("matmul", "train", 5.0, 0.03, suite="pos_embed")]
    said, advice = conclude(rows)
    assert "the position embedding with 8 images (siglip, float32), `matmul` saves 90.0 % of a training step" in said
    assert "differ by 3.0 %" in said and "bench --model NAME" in advice
    assert list(conclude(rows[1:])) == [advice] and list(conclude([])) == []
