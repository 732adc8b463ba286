"""The tables that tools/pages.py makes from result files, and the commands that measure these."""

import json
import re

import measure
import pages
import pos_embed
import pytest
import torch
from page_parts import audit
from page_parts.race_tables import race_table

from tests.support.measured import row


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes rows into a file of an empty folder of results."""
    monkeypatch.setattr("page_parts.results.RESULTS", tmp_path / "results")

    def write(name, *rows, **about):
        path = tmp_path / "results" / f"{name}.json"
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
    _, _, *without_timm = race(batch=1)
    results("speed/siglip", *race(), *without_timm)
    table = race_table("position")
    heading = table.splitlines()[0]
    ratios = r"times faster than timm +\| than timm's grid_sample +\| of the time of one plain add"
    assert re.search(ratios, heading)
    assert re.search(r"siglip, train, 64, float32 +\| 50\.0 +\| 5\.00 +\| 2\.00 ", table)
    # There is no ratio to a contender of another race.
    assert re.search(r"siglip, train, 1, float32 +\| - +\| - +\| 2\.00 ", table)

    results("speed/others", *race(workload="single"), commit="def")
    assert "commit def / abc; " in race_table("position")


def check(monkeypatch, capsys, option):
    """The exit status of tools/pages.py, and what it prints."""
    monkeypatch.setattr(pages, "PAGES", [])
    monkeypatch.setattr("sys.argv", ["pages.py", option])
    status = pages.main()
    return status, capsys.readouterr().out.splitlines()


def old_results(results):
    commit = "0" * 40
    results("counts", commit="HEAD")
    results("rope", commit=commit)
    results("tests/forced_stock", commit=commit, green=["test_green"])
    return [
        f"rope.json: its code has changed since {commit}",
        f"tests/forced_stock.json: its code has changed since {commit}",
        "tests/forced_stock.json: test_green passes without ours",
    ]


def lost_races(results):
    lost = row(times_faster=0.85)
    not_lost = row(times_faster=0.9)
    timms = row("timm-flag-bilinear", times_faster=0.1)
    floor = row("plain-add", times_faster=0.5)
    results("speed/unseen", lost, not_lost, timms, floor, commit="HEAD")
    # timm's loop cannot be exported, so an exported program races with something else.
    results("exported", row(suite="exported", times_faster=0.2), commit="HEAD")
    return ["speed/unseen.json: siglip train B=64 matmul has 0.85 of the library's speed"]


def failed_tests(results):
    commit = "1" * 40
    layers = {"patch": {"failures": []}, "model": {"failures": ["test_red"]}}
    results(
        "versions/matrix", {"commit": commit, "layers": {}}, {"commit": "HEAD", "layers": layers}
    )
    # What fails under stock too is not broken.
    stock = {"commit": "HEAD", "failures": ["known", "new"], "broken": []}
    matmul = {"commit": "HEAD", "failures": ["known", "new"], "broken": ["new"]}
    results("versions/timm_tests", stock, matmul)
    return [
        f"versions/matrix.json: its code has changed since {commit}",
        "versions/matrix.json: test_red fails",
        "versions/timm_tests.json: new fails",
    ]


@pytest.mark.parametrize("make", [old_results, lost_races, failed_tests])
def test_what_is_listed_and_stops_a_release(make, results, monkeypatch, capsys):
    if not (pages.ROOT / ".git").exists():
        pytest.skip("no checkout")
    said = [f"results/{line}" for line in make(results)]
    assert check(monkeypatch, capsys, "--check") == (0, said)
    assert check(monkeypatch, capsys, "--release") == (1, said)


def test_every_result_file_of_the_repository_can_be_looked_through():
    for complaint in pages.complaints():
        assert complaint.startswith("results/")


@pytest.mark.parametrize(
    ("before", "has_changed"),
    [
        ("a = 1  # why", False),
        ('"""What."""\na = 1\n"""Why."""', False),
        ("a = 2", True),
        ("a = 1\n2", True),
    ],
)
def test_a_figure_grows_old_by_code_not_by_words(before, has_changed, monkeypatch):
    files = {"before:a.py": before, "HEAD:a.py": "a = 1"}

    def git(command, *words):
        return "a.py b.py" if command == "diff" else files.get(words[0])

    monkeypatch.setattr("page_parts.audit.git", git)
    assert audit.has_changed("before", ["a.py", "b.py"]) == has_changed


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
        by_others = name.startswith(("against/", "drift/", "recordings/", "versions/", "tests/"))
        assert by_others or name in measure.NAMES, name


def test_unseen_batches_have_other_grids_every_time():
    work = pos_embed.Unseen("unseen", None, 1024)
    sizes = torch.cat([coord.amax(1) + 1 for coord in work.coordinates(50)])  # (batches * 50, 2)
    assert len(sizes.unique(dim=0)) == len(sizes) > 2900
    assert sizes.prod(1).max() <= 1024
