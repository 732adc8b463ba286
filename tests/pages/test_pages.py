"""The tables that lab/tools/pages.py makes from result files, and the commands that measure these."""

import json
import re

import pytest

from lab.benchmarks import measure
from lab.tools import pages
from lab.tools.page_parts import races, sections
from tests.support.measured import row


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes rows into a file of an empty folder of results."""
    monkeypatch.setattr("lab.tools.page_parts.results.RESULTS", tmp_path / "lab" / "results")

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


def test_ratios_are_those_of_one_race_and_both_commits_are_named(results):
    results("speed/diverse", *race(workload="diverse"), commit="def")
    results("speed/siglip", *race())
    table = races.speed()
    assert "measure.py speed/diverse speed/siglip" in table
    heading = table.splitlines()[0]
    ratios = (
        r"x faster than timm's loop +\| x faster than timm's flag, bilinear +\| time / plain add"
    )
    assert re.search(ratios, heading)
    assert re.search(r"siglip, train, 64 +\| 50\.0 +\| 5\.00 +\| 2\.00 ", table)
    assert "commit def / abc; " in table


def test_a_number_of_a_sentence_is_filled_in(monkeypatch):
    monkeypatch.setattr(sections, "numbers", lambda: {"share": "1.6", "images": "64"})
    text = "At most <!--share-->0<!--/--> % of <!--images--><!--/-->."
    assert pages.fill(text) == "At most <!--share-->1.6<!--/--> % of <!--images-->64<!--/-->."


def test_a_time_says_of_what_it_is():
    assert sections.milliseconds({}) == "not timed"
    assert sections.milliseconds({"median_ms": 130.6}) == "131 ms (one process)"
    several = {"median_ms": 135.0, "lowest_ms": 129.8, "highest_ms": 140.2}
    assert sections.milliseconds(several) == "130 to 140 ms"


@pytest.mark.parametrize("option", ["--check", None])
def test_a_page_that_differs_is_named_or_written(option, results, tmp_path, monkeypatch, capsys):
    results("speed/siglip", *race())
    results("speed/diverse", *race())
    page = tmp_path / "page.md"
    text = "Before.\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nAfter."
    page.write_text(text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", [page])
    monkeypatch.setattr(pages, "draw_drift", lambda: None)
    monkeypatch.setattr("sys.argv", ["pages.py", *filter(None, [option])])

    assert pages.main() == bool(option)
    if option:
        assert page.read_text() == text
        assert capsys.readouterr().out == "page.md is old: uv run lab/tools/pages.py\n"
    else:
        table = races.speed()
        assert page.read_text() == text.replace("old", table)
        assert pages.main() == 0  # nothing is left to write


def test_each_result_file_has_a_command():
    for path in pages.RESULTS.rglob("*.json"):
        name = str(path.relative_to(pages.RESULTS).with_suffix(""))
        by_others = name.startswith(
            ("drift/", "recordings/", "versions/", "tests/", "in_timm", "executorch")
        )
        assert by_others or name in measure.MEASURED, name


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
