"""``naflex-fast compare`` from two folders to a verdict; what cannot be compared is told in a line."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.recordings.format import read_about

ROOT = Path(__file__).resolve().parents[3]
KIT = ROOT / "recordings" / "siglip2_naflex_tiny"


@pytest.fixture
def reference(tmp_path):
    """A copy of the kit, which a test may spoil."""
    folder = tmp_path / "REF"
    folder.mkdir()
    for file in KIT.glob("*.*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def port(tmp_path):
    """A right port, which a test may spoil."""
    (tmp_path / "PORT").mkdir()
    shutil.copy(KIT / "stages.safetensors", tmp_path / "PORT")
    return tmp_path / "PORT"


@pytest.fixture
def compare(capsys):
    """The exit status and what is printed; an error is one line."""

    def compare(reference, port, *options):
        capsys.readouterr()
        status = main(["compare", str(reference), str(port), *options])
        out, err = capsys.readouterr()
        assert len(err.splitlines()) <= 1
        return status, out + err

    return compare


def spoil(folder, name, change):
    """One array of a folder is another, or (None) is not there."""
    arrays = load_file(folder / "stages.safetensors")
    made = change(arrays.pop(name))
    if made is not None:
        arrays[name] = np.ascontiguousarray(made)
    save_file(arrays, folder / "stages.safetensors")


# Verdicts.


def test_a_recording_is_equal_to_itself_and_has_status_0(compare):
    status, printed = compare(KIT, KIT)
    assert status == 0
    assert "equal within float32's rounding, on 10 pictures: pooled differs by 0.0e+00" in printed
    rows = [line.split()[0] for line in printed.splitlines()[1:-1]]
    assert rows == [stage["name"] for stage in read_about(KIT)["stages"]]


def test_a_port_that_parts_has_status_1_and_figures_as_json(port, tmp_path, compare):
    spoil(port, "001.block_1", lambda x: 3 * x)
    file = tmp_path / "figures.json"
    status, printed = compare(KIT, port, "--json", str(file))
    assert status == 1
    assert "parts at block_1, in 1 of 10 pictures: " in printed
    assert "every number is 3 times the reference's" in printed
    found = json.loads(file.read_text())
    assert (found["first"], found["precision"], found["not_compared"]) == ("block_1", "float32", [])
    assert {"command", "commit", "date", "python"} <= set(found)
    assert found["reason"]["pictures"] == [1]
    assert [row["parting"] for row in found["stages"] if row["stage"] == "block_1"] == [[1]]
    assert all(sentence in printed for sentence in found["verdict"])


@pytest.mark.parametrize(
    ("precision", "which"), [("bfloat16", "bfloat16"), ("float16", "tf32 or float16")]
)
def test_the_precision_is_said_and_the_hint_names_it(precision, which, port, compare):
    _, _, _, _, block, *_ = read_about(KIT)["stages"]
    most = min(block["limits"][precision].values())
    spoil(port, "001.block_0", lambda x: x * (1 + 0.9 * most))
    status, printed = compare(KIT, port)
    assert status == 1 and "parts at block_0, in 1 of 10 pictures: " in printed
    assert f"as large as {which}'s rounding: " in printed
    assert f"say --precision {which}\n" in printed
    status, printed = compare(KIT, port, "--precision", precision)
    assert status == 0
    assert f"equal within {precision}'s rounding, on 10 pictures: " in printed


def test_a_stage_may_be_left_out_and_a_picture_if_it_is_meant(port, compare):
    file = port / "stages.safetensors"
    arrays = load_file(file)
    kept = {name: x for name, x in arrays.items() if not name.endswith(("grid", "pixels"))}
    save_file(kept, file)
    status, printed = compare(KIT, port)
    assert status == 0
    assert printed.endswith("not written by the port, so not compared: grid, pixels\n")

    spoil(port, "003.norm", lambda x: None)
    spoil(port, "007.pooled", lambda x: None)
    for options, wanted in (([], 2), (["--partial"], 0)):
        status, printed = compare(KIT, port, *options)
        assert status == wanted and printed.startswith("missing: 2 pictures, the first is 003")


def test_neither_torch_nor_timm_is_needed(port):
    spoil(port, "001.position_embedding", lambda x: 3 * x)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['timm'] = None\n"
        "from timm_naflex_fast.commands.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "compare", str(KIT), str(port)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.slow
def test_it_is_installed_without_torch_as_the_page_says(tmp_path):
    page = (ROOT / "docs" / "recordings.md").read_text(encoding="utf-8")
    (install,) = re.findall("^pip install --no-deps .*", page, re.MULTILINE)
    venv.create(tmp_path, with_pip=True)
    programs = str(tmp_path / "bin")
    environment = {**os.environ, "PATH": os.pathsep.join([programs, os.environ["PATH"]])}
    subprocess.run(install, shell=True, cwd=ROOT, env=environment, check=True)
    command = [f"{programs}/naflex-fast", "compare", str(KIT), str(KIT)]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0


def test_without_a_port_the_known_mistakes_are_printed(capsys):
    assert main(["compare", str(KIT)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "stage", "words"]
    names = [mistake["name"] for mistake in read_about(KIT)["mistakes"]]
    assert [row.split()[0] for row in rows] == names


# What cannot be compared.


def spoil_json(folder, path, value):
    """recording.json with another value at a path of keys, or ("gone") without it."""
    file = folder / "recording.json"
    whole = part = json.loads(file.read_text())
    *keys, last = path.split("/")
    keys = [int(key) if key.isdigit() else key for key in keys]
    for key in keys:
        part = part[key]
    if value == "gone":
        del part[last]
    else:
        part[last] = value
    file.write_text(json.dumps(whole))


UNUSABLE_JSON = [
    ("version", 1, "it is of version 1, and this release reads 2"),
    ("pictures/1/grid", "gone", "KeyError('grid')"),
    ("pictures/0/file", 5, "TypeError("),
    ("pictures/0/grid", [1, 2], "must hold every stage of every picture, with the grids of"),
    ("mistakes", None, "TypeError("),
    ("mistakes/0/words", "gone", "KeyError('words')"),
    ("mistakes/0/stage", "block_7", "ValueError("),
    ("mistakes/0/pictures", [10], "ValueError("),
    ("stages/1/name", "grid", "its stages must have different names, grid first"),
    ("stages/4/limits/tf32", "gone", "KeyError('tf32')"),
    ("stages/4/limits/float32", {"token": 0, "channel": 1}, "0 is no number above 0"),
]


@pytest.mark.parametrize(("path", "value", "words"), UNUSABLE_JSON)
def test_a_recording_json_that_cannot_be_used_is_told_in_a_line(
    path, value, words, reference, port, compare
):
    spoil_json(reference, path, value)
    status, printed = compare(reference, port)
    assert status == 2 and len(printed.splitlines()) == 1
    assert words in printed


def of_text(folder, text):
    (folder / "recording.json").write_text(text)


def more(folder, name):
    """One more array."""
    arrays = load_file(folder / "stages.safetensors")
    save_file({**arrays, name: np.zeros((10, 32))}, folder / "stages.safetensors")


def archive(file):
    with file.open("wb") as opened:
        np.savez(opened, numbers=np.zeros(32))


def four_terabytes(file):
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    file.write_bytes(b"\x93NUMPY\x01\x00v\x00" + head.ljust(117).encode() + b"\n")


def trailing(file):
    np.save(file, np.zeros(32))
    file.write_bytes(file.read_bytes() + b"more")


POOLED = np.zeros(32, np.float32)
# What is done to the reference (R) or to the port (P), and what is said.
UNUSABLE = {
    "no stages": (lambda R, P: (R / "stages.safetensors").unlink(), "there is no file "),
    "deep json": (lambda R, P: of_text(R, "[" * 100_000), "does not describe a recording ("),
    "stage": (lambda R, P: spoil(R, "003.norm", lambda x: None), "must hold every stage"),
    "short": (lambda R, P: spoil(R, "003.norm", lambda x: x[:-1]), "003.norm must have shape"),
    "newline": (lambda R, P: more(P, "0.poo\nled"), r"no '0.poo\nled'; valid: 000 to 009, and af"),
    "batch too": (lambda R, P: more(P, "pooled"), "must be one batch of 10"),
    "nan": (lambda R, P: spoil(P, "001.norm", lambda x: x * np.nan), "must hold finite numbers"),
    "grid 0": (lambda R, P: spoil(P, "001.grid", lambda x: 0 * x), "must hold numbers from 1 on"),
    "both kinds": (lambda R, P: np.save(P / "001.norm.npy", POOLED), "remove one of the two"),
    "nothing": (lambda R, P: (P / "stages.safetensors").unlink(), "PORT holds no stages: write"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_compared_is_told_in_a_line(case, reference, port, tmp_path, compare):
    spoiled, words = UNUSABLE[case]
    spoiled(reference, port)
    status, printed = compare(reference, port, "--json", str(tmp_path / "figures.json"))
    assert status == 2 and len(printed.splitlines()) == 1
    assert words in printed
    assert not (tmp_path / "figures.json").exists()


def text(file):
    np.save(file, ["a"] * 32)


FILES = [
    ("stages.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-9])),
    ("stages.safetensors", lambda file: file.write_bytes(file.read_bytes() + b"x")),
    ("001.pooled.npy", archive),
    ("001.pooled.npy", four_terabytes),
    ("001.pooled.npy", trailing),
    ("001.pooled.npy", text),
    ("001.pooled.npy", os.mkfifo),
]


@pytest.mark.parametrize(("name", "write"), FILES)
def test_a_damaged_file_is_named_at_once(name, write, port, compare):
    if name.endswith(".npy"):
        (port / "stages.safetensors").unlink()
    write(port / name)
    start = time.perf_counter()
    status, printed = compare(KIT, port)
    assert status == 2 and len(printed.splitlines()) == 1
    assert name.removesuffix(".npy") in printed
    assert time.perf_counter() - start < 2
