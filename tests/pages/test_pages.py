"""The tables that lab/tools/pages.py makes from result files, and the commands that measure these."""

import json
import re

import measure
import pages
import pos_embed
import pytest
import torch
from page_parts import races

from tests.support.measured import row


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes rows into a file of an empty folder of results."""
    monkeypatch.setattr("page_parts.results.RESULTS", tmp_path / "lab" / "results")

    def write(name, *rows, **about):
        path = tmp_path / "lab" / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = dict(
            machine="2 CPU cores",
            torch="2.15",
            timm="1.0.31",
            date="2026-11-22",
            commit="abc",
            code_last_changed_in="abc",
        )
        path.write_text(json.dumps({**facts, **about, "rows": rows}))

    return write


def race(**changes):
    times = {"stock": 400.0, "timm-flag-bilinear": 40.0, "matmul": 8.0, "plain-add": 4.0}
    return [row(name, median_ms=ms, **changes) for name, ms in times.items()]


def position():
    return races.race_table("speed/*", (*races.STEP, "dtype"), races.FASTER)


def test_ratios_are_those_of_one_race_and_both_commits_are_named(results):
    _, _, *without_timm = race(batch=1)
    results("speed/siglip", *race(), *without_timm)
    table = position()
    heading = table.splitlines()[0]
    ratios = (
        r"x faster than timm's loop +\| x faster than timm's flag, bilinear +\| time / plain add"
    )
    assert re.search(ratios, heading)
    assert re.search(r"siglip, train, 64, float32 +\| 50\.0 +\| 5\.00 +\| 2\.00 ", table)
    # There is no ratio to a contender of another race.
    assert re.search(r"siglip, train, 1, float32 +\| - +\| - +\| 2\.00 ", table)

    results("speed/others", *race(workload="single"), commit="def")
    assert "commit def / abc; " in position()


@pytest.mark.parametrize("option", ["--check", None])
def test_a_page_that_differs_is_named_or_written(option, results, tmp_path, monkeypatch, capsys):
    results("speed/siglip", *race())
    page = tmp_path / "page.md"
    text = "Before.\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nAfter."
    page.write_text(text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [page])
    for name in ("draw_drift", "draw_graphs"):
        monkeypatch.setattr(pages, name, lambda: None)
    monkeypatch.setattr("sys.argv", ["pages.py", *filter(None, [option])])

    assert pages.main() == bool(option)
    if option:
        assert page.read_text() == text
        assert capsys.readouterr().out == "page.md is old: uv run lab/tools/pages.py\n"
    else:
        table = races.speed()
        assert page.read_text() == text.replace("old", table)
        assert pages.main() == 0  # nothing is left to write


def test_what_this_code_has_measured_here_is_not_measured_again(results, tmp_path, monkeypatch):
    facts = dict(machine="2 CPU cores", torch="2.15", timm="1.0.31", code_last_changed_in="abc")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    results("rope")
    results("counts", code_last_changed_in="old")
    assert not measure._is_old("rope", facts)
    assert measure._is_old("counts", facts)
    assert measure._is_old("graphs", facts)  # there is no result


def test_each_result_file_has_a_command():
    for path in pages.RESULTS.rglob("*.json"):
        name = str(path.relative_to(pages.RESULTS).with_suffix(""))
        by_others = name.startswith(("drift/", "recordings/", "versions/", "tests/"))
        assert by_others or name in measure.MADE_HERE, name


def test_each_test_that_a_page_names_is_there():
    there = set()
    for path in (pages.ROOT / "tests").rglob("test_*.py"):
        there.add(path.name)
        there.update(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    named = set()
    for page in (*pages.PAGES, pages.ROOT / "CONTRIBUTING.md"):
        # But for the pattern of CONTRIBUTING.
        text = page.read_text().replace("`tests/a/test_b.py`", "")
        named.update(re.findall(r"\btest_\w+(?:\.py)?", text))
        for path in re.findall(r"(?<![\w/])tests/[\w/.]*\w", text):
            assert (pages.ROOT / path).exists(), f"{page.name}: {path}"
    assert len(named) > 5
    assert named <= there


def test_unseen_batches_have_other_grids_every_time():
    work = pos_embed.Unseen("unseen", None, 1024)
    sizes = torch.cat([coord.amax(1) + 1 for coord in work.coordinates(50)])  # (batches * 50, 2)
    assert len(sizes.unique(dim=0)) == len(sizes) > 2900
    assert sizes.prod(1).max() <= 1024
