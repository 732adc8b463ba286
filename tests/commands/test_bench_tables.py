"""The tables that tools/ writes from result files, and the plots that benchmarks/ draws from them."""

import random
from dataclasses import asdict, replace
from itertools import pairwise

import measure as commands
import plots
import pytest
import speed_tables
from measured import row

from timm_naflex_fast.measure.output import write_json
from timm_naflex_fast.measure.provenance import provenance

RENDERS = [getattr(speed_tables, name) for name in dir(speed_tables) if name.startswith("render_")]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results; call it to write rows into one of its files."""
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)

    def write(name, *rows):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**provenance("test"), "rows": [asdict(one) for one in rows]})

    write.folder = tmp_path
    return write


@pytest.mark.parametrize("render", RENDERS)
def test_what_is_not_measured_is_not_in_the_tables(render, results):
    assert render().startswith("Not measured")


def test_figures_stand_beside_their_targets():
    assert speed_tables.judged(42.0, 40) == "42.0 (target >= 40)"
    assert speed_tables.judged(39.0, 40) == "39.0 (target >= 40, **missed**)"
    assert speed_tables.judged(1.6, 1.5, at_most=True) == "1.60 (target <= 1.5, **missed**)"
    assert speed_tables.judged(None, 3) == "not measured" and speed_tables.judged(2.0) == "2.00"


def race(**changes):
    times = {"stock": 400.0, "timm-flag-bilinear": 40.0, "matmul": 8.0, "plain-add": 4.0}
    return [
        row(name, median_ms=ms, times_faster=400 / ms, times_plain_add=ms / 4, ours=name == "matmul", **changes)
        for name, ms in times.items()
    ]


def test_speed(results):
    results("speed/siglip", *race(), *race(phase="infer"), *race(phase="frozen"))
    assert "`uv run benchmarks/measure.py speed/siglip`" in speed_tables.render_targets()
    slow = replace(race()[2], batch=1, times_faster=0.5)
    results("speed/small", slow)
    text = speed_tables.render_targets()
    assert "| train, times one plain add | 2.00 (target <= 1.5, **missed**) | not measured |" in text
    assert "| `matmul` | siglip, train, B=1, float32 | 0.50 |" in text and "at worst 0.50 times as fast" in text


def test_heaps_side_by_side(results):
    kept = [replace(one, about={"heap": "kept"}) for one in race()]
    default = [replace(one, about={"heap": "default"}) for one in race()]
    default[0] = replace(default[0], median_ms=800.0)
    results("heap", *default, *kept)
    assert "| siglip, train, B=64 | 50.0 | 100 | 5.00 | 5.00 |" in speed_tables.render_heap()
    assert "| siglip | 50.0 / 100 | 5.00 | 2.00 | not measured / not measured |" in speed_tables.render_short()


def test_whole_models(results):
    about = {"model": "m", "embeds_share": {"stock": 0.05, "matmul": 0.01}}
    stock, _, ours, _ = (replace(one, suite="model", about=about, spread=0.02) for one in race())
    results("model/base", stock, replace(ours, median_ms=390.0))
    line = "| m, siglip, B=64 | train, float32 | 400 | 390 | 2.5 % | 2.0 % | 5.0 % | 1.0 % |"
    assert line in speed_tables.render_model()
    assert "| m | siglip | - | 98.0±2 | - | - |" in speed_tables.render_model_short()


def test_counts(results):
    of = dict(workload="siglip", phase="train", batch=64, grids=21, host_waits=1, whole_writes=0)
    rows = [{**of, "contender": "matmul", "read": 3 * 10**8, "written": 10**8, "memory": 2 * 10**8, "operators": 1234}]
    rows += [{**rows[0], "contender": "plain-add", "memory": 10**8, "operators": 2}]
    write_json(results.folder / "counts.json", {**provenance("test"), "rows": rows})
    text = speed_tables.render_counts()
    assert "| siglip, train, B=64, 21 grids | `matmul` | 0.400 | 0.200 | 2.00 | 1,234 | 1 | 0 |" in text


def test_gpu(results):
    results("gpu/diverse", *race(batch=512), *race(batch=512, phase="infer"))
    text = speed_tables.render_gpu()
    assert "| siglip, float32, train, B=512 | 2.00 (target <= 1.5, **missed**) | 50.0 |" in text
    assert "| siglip, float32, infer, B=512 | 2.00 (target <= 1.3, **missed**) | 50.0 |" in text


def test_each_result_file_has_a_command_that_exists():
    for command in commands.COMMANDS.values():
        script = command.split()[0]
        assert script in commands.TINY
        assert script == "bench" or (commands.ROOT / "benchmarks" / script).exists()


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    many = [
        replace(one, batch=batch, workload=workload)
        for batch in (1, 16)
        for workload in ("siglip", "radio")
        for one in race()
    ]
    written = plots.plot(many, tmp_path / "new")
    assert [path.name for path in written] == ["time_over_batch.png", "times_faster.png"]
    assert all(path.stat().st_size > 10_000 for path in written)
    assert [path.name for path in plots.plot(race(), tmp_path)] == ["times_faster.png"]
    assert plots.plot([row("plain-add")], tmp_path) == []


def test_names_at_the_ends_of_lines_keep_apart():
    source = random.Random(0)
    heights = {str(n): source.uniform(0, 3) for n in range(9)}
    moved = sorted(plots._apart(heights, 0.5).values())
    assert all(b - a > 0.5 - 1e-9 for a, b in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights.values()))
    assert plots._apart({"a": 0.0, "b": 2.0}, 0.5) == {"a": 0.0, "b": 2.0}
