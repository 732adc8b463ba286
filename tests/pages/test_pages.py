"""The tables that tools/pages.py makes from result files, and the commands that measure these."""

import json

import measure
import pages
import pytest
import races
import torch

from tests.support.measured import row
from timm_naflex_fast.measure.bench.workloads import siglip_grids


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes rows into a file of an empty folder of results."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")

    def write(name, *rows, **about):
        path = tmp_path / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = dict(
            machine="2 CPU cores", torch="2.15", timm="1.0.31", date="2026-11-22", commit="abc"
        )
        path.write_text(json.dumps({**facts, **about, "rows": rows}))

    return write


def race(**changes):
    times = {"stock": 400.0, "timm-flag-bilinear": 40.0, "matmul": 8.0, "plain-add": 4.0}
    return [row(name, median_ms=ms, **changes) for name, ms in times.items()]


def cells(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_ratios_are_those_of_one_race_and_both_commits_are_named(results):
    results("speed/siglip", *race(), *race(batch=1)[2:])
    (headings, _, full, part) = cells(pages.race_table("position"))
    ratios = ["times faster than timm", "than timm's grid_sample", "times one plain add"]
    assert headings[:4] == ["workload, phase, batch, dtype", *ratios]
    assert full[:4] == ["siglip, train, 64, float32", "50.0", "5.00", "2.00"]
    assert part[:4] == [
        "siglip, train, 1, float32",
        "-",
        "-",
        "2.00",
    ]  # no ratio to a contender of another race
    results("speed/others", *race(workload="single"), commit="def")
    assert "commit def / abc; " in pages.race_table("position")


def check(monkeypatch, capsys, option, *shown):
    """The exit status of tools/pages.py, and what it prints."""
    monkeypatch.setattr(pages, "PAGES", shown)
    monkeypatch.setattr("sys.argv", ["pages.py", option])
    return pages.main(), capsys.readouterr().out.strip()


def test_an_old_page_is_noticed(results, tmp_path, monkeypatch, capsys):
    (page := tmp_path / "page.md").write_text(
        "<!-- rope: begin -->\n1.5 times\n<!-- rope: end -->\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert check(monkeypatch, capsys, "--check", page) == (
        1,
        "page.md is old: uv run tools/pages.py",
    )
    assert "1.5 times" in page.read_text()


def test_what_is_listed_and_stops_a_release(results, monkeypatch, capsys):
    """Old results, lost races, tests that fail on a pairing of releases, and those that do not
    notice forced stock."""
    if not (pages.ROOT / ".git").exists():
        pytest.skip("no checkout")
    results("counts", commit="HEAD")
    for name in ("rope", "tests/forced_stock"):
        results(name, commit="0" * 40, green=["test_green"] if name[0] == "t" else [])
    lost, kept = (
        row(times_faster=0.85),
        [row(times_faster=0.9), row("timm-flag-bilinear", times_faster=0.1)],
    )
    results("speed/unseen", lost, *kept, row("plain-add", times_faster=0.5), commit="HEAD")
    results(
        "exported", row(suite="exported", times_faster=0.2), commit="HEAD"
    )  # timm's loop cannot be exported
    layers = {"patch": {"failures": []}, "model": {"failures": ["test_red"]}}
    results(
        "versions/matrix", {"commit": "1" * 40, "layers": {}}, {"commit": "HEAD", "layers": layers}
    )
    modes = [
        {"commit": "HEAD", "failures": ["known", "new"], "broken": broken}
        for broken in ([], ["new"])
    ]
    results("versions/timm_tests", *modes)  # what fails under stock too is not broken
    lines = [
        f"rope.json: its code has changed since {'0' * 40}",
        "speed/unseen.json: siglip train B=64 matmul has 0.85 of the library's speed",
        f"tests/forced_stock.json: its code has changed since {'0' * 40}",
        "tests/forced_stock.json: test_green passes without ours",
        f"versions/matrix.json: its code has changed since {'1' * 40}",
        "versions/matrix.json: test_red fails",
        "versions/timm_tests.json: new fails",
    ]
    said = "\n".join(f"results/{line}" for line in lines)
    assert check(monkeypatch, capsys, "--check") == (0, said) and check(
        monkeypatch, capsys, "--release"
    ) == (1, said)
    files = {
        "diff": "a.py b.py",
        "new:a.py": "a = 1  # why",
        "HEAD:a.py": "a = 1",
        "old:a.py": "a = 2",
    }
    monkeypatch.setattr(
        pages, "git", lambda command, *words: files.get("diff" if command == "diff" else words[0])
    )
    assert [bool([*pages.outdated([{"commit": commit}], ())]) for commit in ("new", "old")] == [
        False,
        True,
    ]


def test_what_this_code_has_measured_here_is_not_measured_again(
    results, tmp_path, monkeypatch, capsys
):
    facts = dict(machine="2 CPU cores", torch="2.15", timm="1.0.31", commit="abc")
    done, load = [], [0.1]
    monkeypatch.setattr(measure, "provenance", lambda command: facts)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "NAMES", ("rope", "counts", "graphs"))
    monkeypatch.setattr(measure, "measure", lambda name, tiny: done.append(name) or {})
    monkeypatch.setattr(measure.os, "getloadavg", lambda: load)
    results("rope")
    results("counts", commit="old")
    for words in ([], ["rope"]):
        monkeypatch.setattr("sys.argv", ["measure.py", *words])
        measure.main()
    assert done == ["counts", "graphs", "rope"]
    load[0] = 1.5
    with pytest.raises(SystemExit):
        measure.main()
    assert "something else is running" in capsys.readouterr().err


def test_each_result_file_of_a_section_has_a_command():
    for pattern in {section.files for section in pages.RACES.values()}:
        assert any(
            name == pattern or name.startswith(pattern.rstrip("*")) for name in measure.NAMES
        ), pattern
    for path in pages.RESULTS.rglob("*.json"):
        name = str(path.relative_to(pages.RESULTS).with_suffix(""))
        assert name in measure.NAMES or name.split("/")[0] in ("drift", "versions", "tests"), name


def test_unseen_batches_have_other_grids_every_time_and_a_quarter_of_the_dropped_tokens_is_left():
    batches = races.Unseen("unseen", (16, 16), "bilinear", None, length=1024).coordinates(50)
    grids = [tuple(size) for _ in range(20) for size in (next(batches).amax(1) + 1).tolist()]
    assert len({*grids}) == 1000 and max(h * w for h, w in grids) <= 1024
    dropped = races.Dropped("dropped", (16, 16), "bilinear", siglip_grids(256))
    sizes, batches = dropped.grids(9), dropped.coordinates(9)
    coord = next(batches)
    assert next(batches) is coord
    for (h, w), own in zip(sizes, coord):
        kept = own[: -(-h * w // 4)]
        assert (own.amax(0) + 1).tolist() == [h, w] and len(kept.unique(dim=0)) == len(kept)
        assert not torch.equal(kept, kept.unique(dim=0))  # they are in no order
