"""The training study: its code on a few steps, its words on figures made by hand, and its committed results."""

import csv
import json
from pathlib import Path

import pytest
import study as section
import torch
import training_report
import training_study
from training_report import NUDGED, STEPS_TO_COINCIDE, TOLERANCE, conclusions, cross_table, recovered_after

MODES = ("stock", "interpolate_cached", "grid_sample", "matmul")
RESULTS = Path(training_study.OUT)
PICTURES = ("losses.png", "fine_tuning.png")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def by_hand(**changes):
    """A record whose answers are known: grid_sample costs 2 points on foreign weights, and 20 steps win them back."""
    own = {"stock": 0.95, "interpolate_cached": 0.95, "grid_sample": 0.93, "matmul": 0.95}
    swapped = {"stock": 0.90, "interpolate_cached": 0.90, "grid_sample": 0.96, "matmul": 0.90}
    table = {name: own for name in MODES} | {"grid_sample": swapped, NUDGED: {k: v + 0.002 for k, v in own.items()}}
    record = {
        "accuracy": {name: {mode: [score, score + 0.01] for mode, score in row.items()} for name, row in table.items()},
        "largest_difference": {"interpolate_cached": [0, 0], "matmul": [1e-6, 3e-6], "grid_sample": [0.5, 0.4]},
        "first_apart": {"interpolate_cached": [None, None], "matmul": [250, 300], "grid_sample": [9, 9]},
        "fine_tuning": {
            "steps": [0, 10, 20, 40],
            "grid_sample": [[0.93, 0.94, 0.95, 0.955], [0.94, 0.95, 0.955, 0.96]],
            "matmul": [[0.95, 0.943, 0.95, 0.951], [0.96, 0.96, 0.96, 0.961]],
        },
        "plan": {"steps": 500, "batch_size": 16, "seeds": [0, 1]},
        "model": {"depth": 4, "embed_dim": 64, "pos_embed_grid_size": [16, 16]},
    }
    record["largest_difference"][NUDGED], record["first_apart"][NUDGED] = [2e-6, 2e-6], [240, 320]
    return record | changes


def test_words_say_what_the_figures_say():
    curves, parted, scratch, swapped, tuned, limits = conclusions(by_hand())
    assert "`interpolate_cached`'s losses are timm's bit for bit" in curves and "within 3e-06" in curves
    assert "up to 0.50 away" in curves
    assert "from step 250 to 300 on" in parted and "from step 240 to 320 on" in parted
    assert "0.2 points from the unmoved run's" in parted and "`matmul`'s are 0.0 points" in parted
    assert "scores 1.0 points more" in scratch and "more than the 0.2 points that one rounding can change" in scratch
    assert "with `grid_sample` lose 2.0 points" in swapped and "antialiasing lose 6.0 points" in swapped
    assert "changes nothing" in swapped
    assert "up to 0.7 points below their start" in tuned
    assert "2.0 points down and reach" in tuned and "after 20 to 40 steps" in tuned
    assert "2 seed(s)" in limits


def test_words_when_it_goes_the_other_way():
    record = by_hand()
    record["fine_tuning"]["grid_sample"] = [[0.93, 0.94, 0.94, 0.94], [0.94, 0.95, 0.95, 0.955]]
    record["accuracy"]["grid_sample"]["grid_sample"] = [0.949, 0.959]
    record["first_apart"]["matmul"] = [None, None]
    said = conclusions(record)
    assert len(said) == 5 and recovered_after(record) == [None, None]
    assert "0.1 points less" in said[1] and "no more than the 0.2 points" in said[1]
    assert "do not reach the accuracy they had with antialiasing within 40 steps" in said[3]
    record["accuracy"]["grid_sample"]["grid_sample"] = [0.949, 0.999]
    assert "the seeds disagree on which is better, so 2 seeds do not tell" in conclusions(record)[1]
    record["fine_tuning"]["grid_sample"][0][1] = 0.95  # but not kept
    assert recovered_after(record) == [None, None]
    record["fine_tuning"]["grid_sample"][0][2:] = [0.951, 0.952]
    assert recovered_after(record) == [10, None]
    assert (
        "after 10 steps of 16 images for 1 of 2 seeds, and not within 40 steps for the rest" in conclusions(record)[3]
    )


def test_cross_table_has_a_row_and_a_column_for_each():
    heading, _, *rows = cross_table(by_hand())
    assert all(f"evaluated with `{mode}`" in heading for mode in MODES)
    assert [row.split(" | ")[0] for row in rows] == [
        *(f"| `{m}`" for m in MODES),
        "| `stock`, one weight one rounding away",
    ]
    assert rows[0].split(" | ")[3] == "93.5 (93.0 to 94.0)"


def test_one_rounding_is_one_rounding():
    plain, moved = (training_study.start(0, nudged).state_dict() for nudged in (False, True))
    different = {name: (moved[name] - plain[name]) for name in plain if not torch.equal(moved[name], plain[name])}
    assert list(different) == ["embeds.proj.weight"]
    (value,) = different["embeds.proj.weight"][different["embeds.proj.weight"] != 0]
    first = plain["embeds.proj.weight"].flatten()[0]
    assert 0 < value <= first.abs() * 2.0**-23


@pytest.mark.slow
@pytest.mark.ran("matmul", "grid_sample")
def test_quick_study_writes_and_draws(one_thread, tmp_path, capsys):
    assert training_study.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    record = training_report.read(tmp_path)
    assert set(record["accuracy"]) == {*MODES, NUDGED} and all(
        set(r) == set(MODES) for r in record["accuracy"].values()
    )
    assert max(map(max, (record["largest_difference"][name] for name in training_study.EXACT))) <= TOLERANCE
    assert record["largest_difference"]["grid_sample"][0] > 0
    assert len(record["fine_tuning"]["matmul"][0]) == len(record["fine_tuning"]["steps"]) == 3
    assert training_report.report(record) in printed
    assert {path.name for path in tmp_path.iterdir()} >= {"study.json", "losses.csv", "losses_first_steps.csv"}
    pytest.importorskip("matplotlib")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in PICTURES)
    assert training_study.main(["--render", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed


def test_a_curve_that_leaves_timms_is_an_error(one_thread, monkeypatch, capsys, tmp_path):
    losses = {name: [1.0, 1.0 + 2 * TOLERANCE * (name == "matmul")] for name in (*MODES, NUDGED)}
    monkeypatch.setattr(training_study, "train_all", lambda *_: (losses, {}))
    assert training_study.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "matmul's loss is 2.0e-04 from timm's" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_committed_results_hold_what_they_say():
    record = json.loads((RESULTS / "study.json").read_text())
    with open(RESULTS / "losses_first_steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == STEPS_TO_COINCIDE and len(record["plan"]["seeds"]) >= 3
    for name, largest in record["largest_difference"].items():
        for seed, value in zip(record["plan"]["seeds"], largest):
            found = max(abs(float(row[f"{name} seed {seed}"]) - float(row[f"stock seed {seed}"])) for row in rows)
            assert found == pytest.approx(value, abs=1e-7)
            assert name == "grid_sample" or found <= TOLERANCE
    assert all((RESULTS / name).is_file() for name in PICTURES)
    assert section.render().startswith("| trained with |")
    assert all(sentence in section.render_conclusions() for sentence in conclusions(record))
