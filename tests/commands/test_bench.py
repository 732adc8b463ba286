"""The bench: arithmetic on a fake clock, tables, sentences, the result file."""

from dataclasses import replace

import pytest
from measured import row

from timm_naflex_fast.measure.bench import report
from timm_naflex_fast.measure.bench.model import conclude
from timm_naflex_fast.measure.bench.race import Contender, Race, run
from timm_naflex_fast.measure.bench.report import advise


class Clock:
    """Seconds that pass only when a contender runs or prepares."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def stopwatch(self, work):
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

        return Contender(name, work, prepare, **kwargs)


def race(*contenders, **about):
    return Race("pos_embed", "siglip", "train", 64, "float32", contenders, about)


def test_medians_and_ratios_on_a_fake_clock():
    clock = Clock()
    # The first of each is the warm-up: as slow as a first call is, and not counted.
    runners = [
        clock.contender("stock", 9, 8.0),
        clock.contender("matmul", 99, 1.0, 4.0, 2.0, ours=True),
        clock.contender("plain-add", 0.5),
    ]
    stock, matmul, plain = run(race(*runners), 3, stopwatch=clock.stopwatch)
    assert [r.contender for r in (stock, matmul, plain)] == ["stock", "matmul", "plain-add"]
    assert (stock.median_ms, matmul.median_ms, plain.median_ms) == (8000, 2000, 500)
    assert (stock.times_faster, matmul.times_faster, plain.times_faster) == (1, 4, 16)
    assert (stock.times_plain_add, matmul.times_plain_add, plain.times_plain_add) == (16, 4, 1)
    assert [r.rounds for r in (stock, matmul, plain)] == [3, 3, 3]
    assert [r.ours for r in (stock, matmul, plain)] == [False, True, False]


def test_rounds_are_interleaved():
    clock, advanced = Clock(), []
    names = ["stock", "matmul", "plain-add"]
    run(
        race(*(clock.contender(n, 1.0) for n in names)),
        4,
        stopwatch=clock.stopwatch,
        advance=lambda: advanced.append(1),
    )
    turns = [clock.calls[i : i + 3] for i in range(0, 15, 3)]
    assert len(clock.calls) == len(advanced) == 15
    assert all(sorted(turn) == sorted(names) for turn in turns) and len({tuple(turn) for turn in turns}) > 1


def test_the_spread_is_the_middle_half_of_the_rounds_over_the_median():
    clock = Clock()
    (row,) = run(race(clock.contender("stock", 9.0, 1.0, 2.0, 3.0, 4.0, 5.0)), 5, stopwatch=clock.stopwatch)
    assert row.median_ms == 3000 and row.spread == pytest.approx(2 / 3)
    assert run(race(clock.contender("stock", 1.0)), 2, stopwatch=clock.stopwatch)[0].spread is None


def test_facts_known_at_the_end_join_the_row():
    clock = Clock()
    made = replace(race(clock.contender("stock", 1.0), tokens=3), finish=lambda: {"calls": len(clock.calls)})
    assert run(made, 2, stopwatch=clock.stopwatch)[0].about == {"tokens": 3, "calls": 3}


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    clock = Clock()
    runners = [
        clock.contender("stock", 20.0),
        clock.contender("interpolate_cached", 0.5),
        clock.contender("matmul", 0.1),
    ]
    rows = run(race(*runners), 10, budget=3.0, stopwatch=clock.stopwatch)
    assert [r.rounds for r in rows] == [3, 6, 10]
    assert [r.times_faster for r in rows] == pytest.approx([1, 40, 200])
    # After the warm-up, in the fourth, seventh and tenth of matmul's ten rounds: before or after it there.
    names = [name for name in clock.calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_memory_is_measured_outside_the_rounds():
    clock, order = Clock(), []

    def stopwatch(work):
        order.append("timed")
        work()
        return 2.0

    rows = run(
        race(clock.contender("stock", 1.0)),
        2,
        stopwatch=stopwatch,
        peak_memory=lambda contender: order.append("memory") or 7,
    )
    assert order == ["timed"] * 3 + ["memory"]
    assert rows[0].peak_bytes == 7 and rows[0].median_ms == 2000


def test_no_baseline_no_ratio():
    clock = Clock()
    (only,) = run(race(clock.contender("matmul", 1.0)), 1, stopwatch=clock.stopwatch)
    assert only.times_faster is None and only.times_plain_add is None and only.peak_bytes is None


def test_advice_names_the_fastest_exact_mode_and_its_figures():
    sizes = [(2, 3), (2, 3), (4, 1)]
    measured = [row("stock", median_ms=100.0), row("matmul", median_ms=4.0), row("grid_sample", median_ms=3.0)]
    measured += [row("interpolate_cached", median_ms=20.0), row("stock", median_ms=1.0, batch=1)]
    text = advise(measured, sizes)
    assert text == (
        "On these 3 images (2 distinct grids) use mode 'matmul' for training (4.00 ms a batch of 64, 25.0 times faster "
        "than timm's own code): "
        "the fastest with timm's own result."
    )
    frozen = [replace(r, phase="frozen") for r in measured[:2]]
    frozen += [row("interpolate_cached", phase="frozen", median_ms=2.0)]
    text = advise(measured + frozen, sizes)
    assert "mode 'matmul' for training" in text and "'interpolate_cached' for inference with frozen weights" in text
    slow = [row("stock", median_ms=1.0), row("matmul", median_ms=4.0)]
    assert "mode 'stock' for training (1.00 ms a batch of 64)" in advise(slow, sizes)
    with pytest.raises(ValueError, match="advice needs stock"):
        advise(measured[1:2], sizes)


def test_tables(capsys):
    about = dict(tokens=12345, grids=7, table="16x16 bilinear", device="cpu", x_bytes=2_000_000)
    about["left_out"] = {"hf-siglip2": "transformers is not installed"}
    report.print_race([row(times_faster=40.0, times_plain_add=1.4, peak_bytes=1_000_000, about=about)])
    text = capsys.readouterr().out
    assert text.startswith("pos_embed siglip train, B=64, float32: 16x16 bilinear, 7 grids, 12,345 tokens, cpu\n")
    assert "not run: hf-siglip2, transformers is not installed" in text
    for cell in ("matmul", "10.0", "40.0", "1.40", "1.0", "0.50", "5"):
        assert cell in text
    assert "rounds" in text


def test_columns_without_a_figure_are_left_out(capsys):
    about = {"embeds_share": {"stock": 0.0214, "matmul": 0.003}}
    report.print_race([row("stock", times_faster=1.0, about=about), row(times_faster=1.1, about=about)])
    text = capsys.readouterr().out
    assert "2.1 %" in text and "0.3 %" in text and "plain add" not in text and "peak" not in text


def test_json_round_trip(tmp_path):
    about = dict(tokens=12, table="16x16 bilinear", left_out={"a": "b, c"}, flag=True)
    rows = [
        row(median_ms=1 / 3, times_faster=2 / 7, times_plain_add=1.5, peak_bytes=123, about=about, ours=True),
        row("stock", about=about),
        row("5", workload="1e3", dtype="12", about={"other": [1, 2.5, None]}, spread=0.1),
    ]
    record = dict(machine="m, 2 cores", torch="2.4", date="2026-01-02", commit=None)
    report.write_json(tmp_path / "a.json", rows, record)
    assert report.read_json(tmp_path / "a.json") == (rows, record)


def test_the_closing_sentence_of_a_model():
    def step(contender, phase, ms, share, spread=0.01):
        about = {"model": "m", "embeds_share": {contender: share}}
        return row(contender, suite="model", phase=phase, batch=8, median_ms=ms, spread=spread, about=about)

    rows = [step("stock", "infer", 100.0, 0.05), step("matmul", "infer", 101.0, 0.06)]
    rows += [step("stock", "train", 1000.0, 0.02), step("matmul", "train", 990.0, 0.01, spread=0.034)]
    rows = [replace(one, ours=one.contender == "matmul") for one in rows]
    assert list(conclude(rows)) == [
        "On this machine, for m with 8 images (siglip, float32), `matmul` saves 1.0 % of a training step (embeddings: "
        "2.0 % of it before, 1.0 % after) and adds 1.0 % to an inference (embeddings: 5.0 % of it before, 6.0 % after)"
        "; rounds of the same code differ by up to 3.4 %."
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{"suite": "a"}]}', "\x00"])
def test_files_that_are_no_results(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="is not a result file"):
        report.read_json(tmp_path / "a.json")
