"""``naflex-fast compare`` from two folders to a verdict; what cannot be compared is told in a line."""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import tiny_recordings
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.recordings.conventions import Convention
from timm_naflex_fast.commands.recordings.format import write_recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recording with all mistakes."""
    _, recording = tiny_recordings.reference()
    out = tmp_path_factory.mktemp("recordings") / "REF"
    write_recording(recording, tiny_recordings.smooth_pictures(), out)
    return out


@pytest.fixture
def reference(folder, tmp_path):
    """A copy of it, which a test may spoil."""
    shutil.copytree(folder, tmp_path / "REF")
    return tmp_path / "REF"


@pytest.fixture
def port(folder, tmp_path):
    """A right port, which a test may spoil."""
    (tmp_path / "PORT").mkdir()
    shutil.copy(folder / "stages.safetensors", tmp_path / "PORT")
    return tmp_path / "PORT"


@pytest.fixture
def compare(capsys):
    """The exit status and the lines that are printed; an error is one line."""

    def compare(reference, port, *options):
        capsys.readouterr()
        status = main(["compare", str(reference), str(port), *options])
        out, err = capsys.readouterr()
        if status == 2:
            assert out == ""
            assert len(err.splitlines()) == 1
        return status, out + err

    return compare


def spoil(folder, name, change, file="stages.safetensors"):
    """One array of a folder is another."""
    arrays = load_file(folder / file)
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    save_file(arrays, folder / file)


def quick_gelu(port, folder):
    """A port with a known mistake in one picture, whose number it gives."""
    mistaken = load_file(folder / "mistakes.safetensors")
    entries = json.loads((folder / "recording.json").read_text())["mistakes"]
    (picture,) = [one["picture"] for one in entries if one["name"] == "quick_gelu"]
    for stage in ("block_0", "block_1", "pooled"):
        name = f"{picture:03}.{stage}"
        spoil(port, name, lambda _, name=name: mistaken[f"quick_gelu/{name}"])
    return picture


# Verdicts.


def test_a_right_port_has_status_0(folder, port, compare):
    status, printed = compare(folder, port)
    assert status == 0
    assert "equal within float32's rounding, on 4 pictures: pooled differs by 0.0e+00" in printed


def test_a_port_that_parts_has_status_1_and_a_reason(folder, port, compare):
    quick_gelu(port, folder)
    status, printed = compare(folder, port)
    assert status == 1
    assert "parts at block_0, in 1 of 4 pictures: " in printed
    assert "the likely reason: quick GELU, x * sigmoid(1.702 x) (that gives the port's" in printed


def test_the_table_has_a_row_for_each_stage(folder, port, compare):
    _, printed = compare(folder, port)
    stages = tiny_recordings.reference()[1].order
    rows = [line.split()[0] for line in printed.splitlines()[1:]]
    assert [row for row in rows if row in stages] == stages


def test_a_convention_that_is_not_recorded_is_told(folder, tmp_path, compare):
    _, recording = tiny_recordings.reference()
    own = recording.stages[2]
    convention = Convention("bicubic", -0.75, positions="asymmetric", antialias=False)
    position = convention.tokens(np.float64(recording.table), [(1, *own["grid"])])
    np.save(tmp_path / "002.patch_embedding.npy", own["patch_embedding"])
    np.save(tmp_path / "002.position_embedding.npy", own["patch_embedding"] + position)
    status, printed = compare(folder, tmp_path)
    assert status == 1
    assert "the likely reason: the table is resampled otherwise: bicubic, coeff" in printed


# Files.


def test_the_figures_are_written_as_json(folder, port, tmp_path, compare):
    picture = quick_gelu(port, folder)
    file = tmp_path / "figures.json"
    status, printed = compare(folder, port, "--json", str(file))
    found = json.loads(file.read_text())
    assert status == 1
    assert found["first"] == "block_0"
    assert found["command"].startswith("naflex-fast compare ")
    assert {"commit", "date", "python"} <= set(found)
    assert (found["pictures"], found["precision"], found["not_compared"]) == (4, "float32", [])
    (reason,) = found["reasons"]
    assert reason["known"] and reason["words"].startswith("quick GELU")
    rows = {row["stage"]: row for row in found["stages"]}
    assert rows["block_0"]["parting"] == [picture]
    assert all(sentence in printed for sentence in found["verdict"])


def test_the_figures_go_to_stdout_and_the_words_to_stderr(folder, port, capsys):
    assert main(["compare", str(folder), str(port), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["first"] is None
    assert "equal within float32's rounding" in err


def test_the_kind_of_an_unknown_difference_is_not_called_a_reason(folder, port, compare):
    spoil(port, "001.block_1", lambda x: 3 * x)
    _, printed = compare(folder, port)
    assert "the kind of difference: every number is 3 times the reference's" in printed
    assert "reason" not in printed


def test_another_grid_is_told(folder, port, compare):
    for number in range(4):
        spoil(port, f"{number:03}.grid", lambda grid: grid[::-1])
    status, printed = compare(folder, port)
    assert status == 1
    assert "the likely reason: the grid is written as (columns, rows)" in printed


def test_it_needs_no_torch_for_a_recorded_mistake(folder, port):
    quick_gelu(port, folder)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['timm'] = None\n"
        "from timm_naflex_fast.commands.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "compare", str(folder), str(port)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "quick GELU" in ended.stdout


# What cannot be compared. Each spoils a copy of the reference, or a port.


def newer_version(reference, port):
    about = json.loads((reference / "recording.json").read_text())
    (reference / "recording.json").write_text(json.dumps(about | {"version": 2}))


def no_stages_of_the_reference(reference, port):
    (reference / "stages.safetensors").unlink()


def no_json(reference, port):
    (reference / "recording.json").unlink()


def broken_json(reference, port):
    (reference / "recording.json").write_text('{"format": ')


def other_json(reference, port):
    (reference / "recording.json").write_text('{"format": "mp3", "version": 1}')


def picture_without_grid(reference, port):
    about = json.loads((reference / "recording.json").read_text())
    del about["pictures"][1]["grid"]
    (reference / "recording.json").write_text(json.dumps(about))


def stage_without_limits(reference, port):
    about = json.loads((reference / "recording.json").read_text())
    about["stages"][2]["limits"] = {}
    (reference / "recording.json").write_text(json.dumps(about))


def array_without_name(reference, port):
    save_file({"": np.zeros((4, 2), np.float32)}, port / "stages.safetensors")


def lacking_stage(reference, port):
    arrays = load_file(reference / "stages.safetensors")
    del arrays["003.norm"]
    save_file(arrays, reference / "stages.safetensors")


def transposed(reference, port):
    spoil(port, "001.block_1", lambda x: x.T)


def too_few_tokens(reference, port):
    spoil(port, "001.block_1", lambda x: x[:-1])


def nan(reference, port):
    def change(x):
        x = x.copy()
        x[4, 7] = x[20, 3] = np.nan
        x[9, 9] = np.inf
        return x

    spoil(port, "001.block_1", change)


def words(reference, port):
    empty(reference, port)
    np.save(port / "001.block_1.npy", np.full((35, 32), "text"))


def files_of_both_kinds(reference, port):
    np.save(port / "001.block_1.npy", np.zeros((35, 32)))


def deeper(reference, port):
    empty(reference, port)
    np.save(port / "001.block_11.npy", np.zeros((35, 32)))


def doubled_table(reference, port):
    spoil(port, "table", lambda table: 2 * table)


def empty(reference, port):
    (port / "stages.safetensors").unlink()


def truncated(reference, port):
    file = port / "stages.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncated_header(reference, port):
    (port / "stages.safetensors").write_bytes(b"\x10\x00\x00")


def truncated_npy(reference, port):
    empty(reference, port)
    np.save(port / "001.block_1.npy", np.zeros((35, 32)))
    file = port / "001.block_1.npy"
    file.write_bytes(file.read_bytes()[:-100])


def unknown_stage(reference, port):
    empty(reference, port)
    np.save(port / "001.blok_1.npy", np.zeros((35, 32)))


def unknown_picture(reference, port):
    empty(reference, port)
    np.save(port / "004.block_1.npy", np.zeros((35, 32)))


def batch_of_another_length(reference, port):
    empty(reference, port)
    np.save(port / "block_1.npy", np.zeros((3, 36, 32)))


UNUSABLE = {
    newer_version: r"recording\.json is of version 2; this release reads 1: install a newer",
    no_stages_of_the_reference: r"REF holds no stages\.safetensors: it is no recording",
    no_json: r"REF holds no recording\.json: it is no recording",
    broken_json: r"recording\.json does not describe a recording",
    other_json: r"recording\.json does not describe a recording",
    picture_without_grid: r"REF is no whole recording \(KeyError\('grid'\)\)",
    stage_without_limits: r"REF is no whole recording \(KeyError\('float32'",
    array_without_name: r"there is no stage ''; valid: grid, pixels, ",
    lacking_stage: r"REF is no whole recording \(KeyError\('norm'",
    transposed: r"001\.block_1 must have shape \(35, 32\); got \(32, 35\), which fits if it is tra",
    too_few_tokens: r"001\.block_1 must have shape \(35, 32\); got \(34, 32\)$",
    nan: r"001\.block_1 must hold finite numbers; got NaN, infinity or float32",
    words: r"001\.block_1 must hold finite numbers; got NaN, infinity or <U4",
    doubled_table: r"PORT: its table is not the reference's: other weights",
    files_of_both_kinds: r"PORT holds stages\.safetensors and 1 \.npy files: remove one of the two",
    deeper: r"there is no stage 'block_11'; did you mean block_1",
    empty: r"PORT holds no stages: write stages\.safetensors, or 000\.block_0\.npy",
    truncated: r"stages\.safetensors is no whole safetensors file",
    truncated_header: r"stages\.safetensors is no whole safetensors file",
    truncated_npy: r"001\.block_1\.npy is no whole \.npy file",
    unknown_stage: r"there is no stage 'blok_1'; did you mean block_1\?; valid: grid, pixels, ",
    unknown_picture: r"004\.block_1: there are 4 pictures, from 000 on",
    batch_of_another_length: r"block_1 has shape \(3, 36, 32\); a batch has 4 pictures first",
}


@pytest.mark.parametrize("spoiled", UNUSABLE, ids=lambda one: one.__name__)
def test_what_cannot_be_compared_is_told_in_a_line(spoiled, reference, port, tmp_path, compare):
    spoiled(reference, port)
    start = time.perf_counter()
    status, printed = compare(reference, port, "--json", str(tmp_path / "figures.json"))
    assert status == 2
    assert re.search(UNUSABLE[spoiled], printed.strip()), printed
    assert time.perf_counter() - start < 2
    assert not (tmp_path / "figures.json").exists()


def test_an_unknown_option_is_told(folder, port, capsys):
    with pytest.raises(SystemExit) as error:
        main(["compare", str(folder), str(port), "--jsn", "x"])
    assert error.value.code == 2
    assert "did you mean --json?" in capsys.readouterr().err
