"""What bench and drift share: provenance, tables, progress, files, plot style."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from timm_naflex_fast.measure import output, style
from timm_naflex_fast.measure.contenders import NAMES, PLAIN_ADD
from timm_naflex_fast.measure.provenance import provenance


def test_provenance():
    about = provenance("naflex-fast bench")
    assert list(about) == ["command", "date", "machine", "python", "torch", "timm"]
    assert about["torch"] == torch.__version__ and "CPU cores" in about["machine"]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")]
)
def test_three_digits(value, text):
    assert output.number(value) == text


def test_tables(capsys):
    output.print_table(["who", "ms"], [["stock", "1"], ["us", "234"]])
    assert capsys.readouterr().out == "who     ms\nstock    1\nus     234\n"


def test_writable_files(tmp_path):
    output.check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("kept")
    output.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    output.write_json(tmp_path / "old.json", {"a": [1]})
    assert json.loads((tmp_path / "old.json").read_text()) == {"a": [1]}
    with pytest.raises(OSError, match="missing"):
        output.check_writable(tmp_path / "missing" / "a.json")
    with pytest.raises(OSError, match="cannot be written"):
        output.check_writable(tmp_path)


@pytest.mark.parametrize(("first", "lines"), [(2.0, [2, 4]), (4.0, [1, 3, 4])])
def test_progress_prints_a_line_every_ten_seconds_and_after_a_long_first_part(first, lines, capsys, monkeypatch):
    clock = iter([0.0, first, 12.0, 14.0, 24.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    advance = output.progress("measuring", 4)
    for _ in range(4):
        advance()
    printed = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in printed] == lines
    assert printed[0].endswith("of 4 done, about 0.2 minutes left")


def test_plots_have_no_background_and_each_contender_its_colour(tmp_path):
    pytest.importorskip("matplotlib")
    figure, axes = style.panels(1, 2, 2.0, 2.0)
    axes[0, 0].plot([1, 2], [3, 4], color=style.COLOURS["matmul"])
    figure.savefig(tmp_path / "a.png", transparent=True)
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "RGBA" and np.asarray(image)[0, 0, 3] == 0
    assert len(style.COLOURS) == len(set(style.COLOURS.values()))
    assert {*NAMES, PLAIN_ADD} == {*style.COLOURS}


def test_names_of_earlier_releases_warn_and_work():
    from timm_naflex_fast.measure.contenders import CONTENDERS, present_name

    assert all(present_name(name) == name for name in CONTENDERS)
    for old, new in (
        ("stock-bilinear", "timm-flag-bilinear"),
        ("issue-2514", "issue-2514-zeros"),
        ("floor", "plain-add"),
    ):
        with pytest.warns(FutureWarning, match=f"{old!r} is now called {new!r}"):
            assert present_name(old) == new
