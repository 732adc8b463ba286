"""The bench: arithmetic on a fake clock, tables, files, pictures, command line."""

import csv
import random
from dataclasses import replace
from itertools import pairwise

import gpu_speed
import numpy as np
import pytest
import torch
from PIL import Image

from timm_naflex_fast.measure.bench import report
from timm_naflex_fast.measure.bench.advice import advise
from timm_naflex_fast.measure.bench.folder import Sizes
from timm_naflex_fast.measure.bench.plot import _apart, plot
from timm_naflex_fast.measure.bench.race import Contender, Race, Row, run, run_together


class Clock:
    """Seconds that pass only when a contender runs or prepares."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

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


def row(contender="matmul", **changes):
    values = dict(suite="pos_embed", workload="siglip", phase="train", batch=64, dtype="float32", rounds=5)
    values |= dict(median_ms=10.0, times_faster=None, times_floor=None, peak_bytes=None, about={}, ours=False)
    return Row(contender=contender, **(values | changes))


def test_medians_and_ratios_on_a_fake_clock():
    clock = Clock()
    # The first of each is the warm-up: as slow as a first call is, and not counted.
    runners = [
        clock.contender("stock", 9, 8.0),
        clock.contender("matmul", 99, 1.0, 4.0, 2.0),
        clock.contender("floor", 0.5),
    ]
    stock, matmul, floor = run(race(*runners), 3, clock=clock)
    assert [r.contender for r in (stock, matmul, floor)] == ["stock", "matmul", "floor"]
    assert (stock.median_ms, matmul.median_ms, floor.median_ms) == (8000, 2000, 500)
    assert (stock.times_faster, matmul.times_faster, floor.times_faster) == (1, 4, 16)
    assert (stock.times_floor, matmul.times_floor, floor.times_floor) == (16, 4, 1)
    assert [r.rounds for r in (stock, matmul, floor)] == [3, 3, 3]
    assert [r.ours for r in (stock, matmul, floor)] == [False, True, False]


def test_rounds_are_interleaved():
    clock, advanced = Clock(), []
    names = ["stock", "matmul", "floor"]
    run(race(*(clock.contender(n, 1.0) for n in names)), 4, clock=clock, advance=lambda: advanced.append(1))
    turns = [clock.calls[i : i + 3] for i in range(0, 15, 3)]
    assert len(clock.calls) == len(advanced) == 15
    assert all(sorted(turn) == sorted(names) for turn in turns) and len({tuple(turn) for turn in turns}) > 1


def test_races_run_together_keep_their_own_rows():
    clock = Clock()
    small = race(clock.contender("stock", 4.0), clock.contender("matmul", 1.0))
    large = replace(race(clock.contender("matmul", 3.0), clock.contender("stock", 6.0)), batch=256)
    results = run_together([small, large], 3, clock=clock)
    assert [[(r.batch, r.contender, r.median_ms, r.times_faster) for r in rows] for rows in results] == [
        [(64, "stock", 4000, 1), (64, "matmul", 1000, 4)],
        [(256, "matmul", 3000, 2), (256, "stock", 6000, 1)],
    ]
    assert len(clock.calls) == 16


def test_the_budget_gives_a_slow_contender_fewer_rounds_but_three_and_spreads_them():
    clock = Clock()
    runners = [
        clock.contender("stock", 20.0),
        clock.contender("interpolate_cached", 0.5),
        clock.contender("matmul", 0.1),
    ]
    rows = run(race(*runners), 10, budget=3.0, clock=clock)
    assert [r.rounds for r in rows] == [3, 6, 10]
    assert [r.times_faster for r in rows] == pytest.approx([1, 40, 200])
    # After the warm-up, in the fourth, seventh and tenth of matmul's ten rounds: before or after it there.
    names = [name for name in clock.calls[3:] if name != "interpolate_cached"]
    before = [names[:place].count("matmul") for place, name in enumerate(names) if name == "stock"]
    assert all(done in (turn - 1, turn) for done, turn in zip(before, (4, 7, 10)))


def test_a_stopwatch_of_its_own_and_memory_outside_the_rounds():
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
    (only,) = run(race(clock.contender("matmul", 1.0)), 1, clock=clock)
    assert only.times_faster is None and only.times_floor is None and only.peak_bytes is None


@pytest.mark.parametrize(
    ("name", "ours", "expected"),
    [("matmul", None, True), ("matmul cached", None, True), ("stock", None, False), ("floor", None, False)]
    + [("vmap", None, False), ("vmap", True, True), ("matmul", False, False), ("stock-bilinear", None, False)],
)
def test_whose_loss_is_reported(name, ours, expected):
    assert Contender(name, print, ours=ours).is_ours is expected


def test_advice_names_the_fastest_exact_mode_and_its_figures():
    sizes = Sizes("photos", [(2, 3), (2, 3), (4, 1)], [])
    measured = [row("stock", median_ms=100.0), row("matmul", median_ms=4.0), row("grid_sample", median_ms=3.0)]
    measured += [row("interpolate_cached", median_ms=20.0), row("stock", median_ms=1.0, batch=1)]
    text = advise(measured, sizes)
    assert text == (
        "On these 3 images (2 distinct grids) use mode 'matmul' for training (4.00 ms a batch of 64, 25.0 times faster "
        "than timm's own code; grid_sample takes 3.00 ms, but its result is not timm's): "
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


def test_losses_are_said():
    measured = [row("matmul", times_faster=0.21, ours=True, workload="radio", phase="infer", median_ms=81.0)]
    measured += [row("matmul", times_faster=40.0, ours=True), row("stock-bilinear", times_faster=0.5)]
    measured += [row("grid_sample", times_faster=0.1, ours=True), row("stock", times_faster=1.0)]
    assert report.losses(measured) == [measured[3], measured[0]]
    assert report.summary(measured) == [
        "slower than stock: grid_sample, pos_embed siglip train, B=64, float32: 10.0 ms, 0.10 x its speed",
        "slower than stock: matmul, pos_embed radio infer, B=64, float32: 81.0 ms, 0.21 x its speed",
    ]
    assert report.summary(measured[1:2]) == ["never slower than stock in 1 comparisons"]


def test_linearity_is_time_per_token():
    small, large = row(median_ms=10.0, about={"tokens": 1000}), row(median_ms=44.0, batch=256, about={"tokens": 4000})
    other = row("floor", median_ms=44.0, batch=256, about={"tokens": 4000})
    assert [(r.batch, ratio) for r, ratio in report.linearity([small, large, other])] == [(256, pytest.approx(1.1))]
    assert any("time per token at B=256 over B=64: 1.10" in line for line in report.summary([small, large]))


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_three_digits(value, text):
    assert report.number(value) == text


@pytest.mark.parametrize("plain", [False, True])
def test_tables(plain, capsys, monkeypatch):
    if plain:
        for name in ("rich", "rich.console", "rich.table"):
            monkeypatch.setitem(__import__("sys").modules, name, None)
    about = dict(tokens=12345, grids=7, table="16x16 bilinear", device="cpu", x_bytes=2_000_000)
    about["left_out"] = {"hf-siglip2": "transformers is not installed"}
    report.print_table([row(times_faster=40.0, times_floor=1.4, peak_bytes=1_000_000, about=about)])
    text = capsys.readouterr().out
    assert text.startswith("pos_embed siglip train, B=64, float32: 16x16 bilinear, 7 grids, 12,345 tokens, cpu\n")
    assert "not run: hf-siglip2, transformers is not installed" in text
    for cell in ("matmul", "10.0", "40.0", "1.40", "1.0", "0.50", "5"):
        assert cell in text
    assert ("│" in text) is not plain and "rounds" in text


def rows_of_all_kinds():
    about = dict(tokens=12, table="16x16 bilinear", left_out={"a": "b, c"}, flag=True)
    return [
        row(median_ms=1 / 3, times_faster=2 / 7, times_floor=1.5, peak_bytes=123, about=about, ours=True),
        row("stock", about=about),
        row("5", workload="1e3", dtype="12", about={"other": [1, 2.5, None]}),
    ]


def test_json_and_csv_round_trip(tmp_path):
    rows, about = rows_of_all_kinds(), dict(machine="m, 2 cores", torch="2.4", date="2026-01-02", commit=None)
    report.write_json(tmp_path / "a.json", rows, about)
    assert report.read_json(tmp_path / "a.json") == (rows, about)
    report.write_csv(tmp_path / "a.csv", rows, about)
    assert report.read_csv(tmp_path / "a.csv") == rows
    with open(tmp_path / "a.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 and all(line["machine"] == "m, 2 cores" and line["torch"] == "2.4" for line in lines)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{"suite": "a"}]}', "\x00"])
def test_files_that_are_no_results(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="is not a result file"):
        report.read_json(tmp_path / "a.json")


def test_provenance():
    about = report.provenance("naflex-fast bench")
    assert list(about) == ["command", "date", "commit", "machine", "python", "torch", "timm"]
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]


def many_rows():
    found = []
    for batch, workload, phase in [(b, w, p) for b in (1, 16) for w in ("siglip", "radio") for p in ("infer", "train")]:
        for name, ms in (("stock", 10.0 * batch**1.5), ("matmul", batch), ("stock-bilinear", 20.0), ("floor", 0.5)):
            key = dict(workload=workload, phase=phase, batch=batch)
            found.append(row(name, median_ms=ms, times_faster=10 * batch**1.5 / ms, ours=name == "matmul", **key))
    return found


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    written = plot(many_rows(), tmp_path / "new")
    assert [path.name for path in written] == ["time_over_batch.png", "times_faster.png"]
    for path in written:
        with Image.open(path) as image:
            assert image.size[0] > 600 and image.mode == "RGBA"
            assert np.asarray(image)[0, 0, 3] == 0  # no background
    assert [path.name for path in plot([r for r in many_rows() if r.batch == 1], tmp_path)] == ["times_faster.png"]
    assert plot([row("floor")], tmp_path) == []


def test_names_at_the_ends_of_lines_keep_apart():
    source = random.Random(0)
    heights = {str(n): source.uniform(0, 3) for n in range(9)}
    moved = sorted(_apart(heights, 0.5).values())
    assert all(b - a > 0.5 - 1e-9 for a, b in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights.values()))
    assert _apart({"a": 0.0, "b": 2.0}, 0.5) == {"a": 0.0, "b": 2.0}


def test_the_gpu_section_judges_what_was_measured_and_says_what_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_speed, "RESULTS", tmp_path)
    assert "no GPU" in gpu_speed.render()
    (tmp_path / "diverse_float32").mkdir()
    rows = []
    for name, seconds in (("stock", 400.0), ("matmul", 1.4), ("floor", 1.0)):
        about = {"waits_for_gpu": ["stock"]}
        (row,) = run(
            Race("pos_embed", "diverse", "train", 512, "float32", (Contender(name, lambda _: None),), about), 1
        )
        rows.append(replace(row, median_ms=1e3 * seconds))
    report.write_json(tmp_path / "diverse_float32" / "bench.json", rows, report.provenance("test"))
    text = gpu_speed.render()
    assert "| forward, times the floor | not measured |" in text
    assert "| forward and backward, times the floor | 1.40 (target <= 1.5) |" in text
    assert "times faster than timm | 286 (target >= 300, **missed**) |" in text
    assert "| waits for the GPU | no |" in text
