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
    rows = {row["stage"]: row for row in found["stages"]}
    assert rows["block_1"]["parting"] == [1]
    assert all(sentence in printed for sentence in found["verdict"])


def test_the_figures_go_to_stdout_and_the_words_to_stderr(port, capsys):
    assert main(["compare", str(KIT), str(port), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["first"] is None
    assert "equal within float32's rounding" in err


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
        assert status == wanted and printed.startswith("missing: 2 pictures (003, 007)")


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


# What cannot be compared: each spoils a copy of the reference, or a port.


def about(*path_and_value):
    """recording.json with another value at a path, or (None) without it."""
    *path, last, value = path_and_value

    def spoiled(reference, port):
        file = reference / "recording.json"
        whole = part = json.loads(file.read_text())
        for key in path:
            part = part[key]
        if value is None:
            del part[last]
        else:
            part[last] = value
        file.write_text(json.dumps(whole))

    return spoiled


def text_of_json(text):
    return lambda reference, port: (reference / "recording.json").write_text(text)


def in_port(name, change):
    return lambda reference, port: spoil(port, name, change)


def in_reference(name, change):
    return lambda reference, port: spoil(reference, name, change)


def more(name, numbers):
    """A port with one more array."""

    def spoiled(reference, port):
        arrays = load_file(port / "stages.safetensors")
        save_file({**arrays, name: numbers}, port / "stages.safetensors")

    return spoiled


def content(change, file="stages.safetensors"):
    """A port's file with other bytes."""

    def spoiled(reference, port):
        whole = (port / "stages.safetensors").read_bytes()
        (port / "stages.safetensors").unlink()
        made = change(whole)
        if made is not None:
            (port / file).write_bytes(made)

    return spoiled


def npy(make):
    """A port of one .npy file, which ``make`` writes."""

    def spoiled(reference, port):
        (port / "stages.safetensors").unlink()
        make(port / "001.pooled.npy")

    return spoiled


def archive(file):
    with file.open("wb") as opened:
        np.savez(opened, numbers=np.zeros(32))


def four_terabytes(file):
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    file.write_bytes(b"\x93NUMPY\x01\x00v\x00" + head.ljust(117).encode() + b"\n")


def trailing(file):
    np.save(file, np.zeros(32))
    file.write_bytes(file.read_bytes() + b"more")


def both_kinds(reference, port):
    np.save(port / "001.pooled.npy", np.zeros(32))


def no_file(name):
    return lambda reference, port: (reference / name).unlink()


POOLED = np.zeros(32, np.float32)
WORD = np.array(["text"] * 32)
LIMITS = ("stages", 4, "limits")
UNUSABLE = {
    "older version": (about("version", 1), r"recording\.json is of version 1; this release reads"),
    "no stages": (no_file("stages.safetensors"), r"REF holds no file stages\.safetensors"),
    "no json": (no_file("recording.json"), r"REF holds no file recording\.json"),
    "cut json": (text_of_json('{"format": '), r"recording\.json does not describe a recording"),
    "other json": (
        text_of_json('{"format": "mp3"}'),
        r"\(ValueError\('its format is not naflex-rec",
    ),
    "deep json": (text_of_json("[" * 100_000), r"does not describe a recording"),
    "no grid": (
        about("pictures", 1, "grid", None),
        r"does not describe a recording \(KeyError\('grid'\)\)",
    ),
    "file 5": (about("pictures", 0, "file", 5), r"does not describe a recording \(TypeError\("),
    "mistakes 5": (about("mistakes", 5), r"does not describe a recording \(TypeError\("),
    "no words": (about("mistakes", 0, "words", None), r"a recording \(KeyError\('words'\)\)"),
    "no limits": (about(*LIMITS, "tf32", None), r"a recording \(KeyError\('tf32'\)\)"),
    "limit 0": (
        about(*LIMITS, "float32", "token", 0),
        r"describe a recording \(ValueError\('0 is no number above 0'\)\)",
    ),
    "limit of text": (about(*LIMITS, "float32", "token", "2e-5"), r"a recording \(TypeError\("),
    "lacking stage": (in_reference("003.norm", lambda x: None), r"holds no 003\.norm"),
    "short reference": (in_reference("003.norm", lambda x: x[:-1]), r"003\.norm must have shape"),
    "no name": (
        more("", POOLED),
        r"there is no ''; valid: 000 to 009, and after a dot grid, pixels, ",
    ),
    "newline": (
        more("000.poo\nled", POOLED),
        r"there is no '000\.poo\\nled'; did you mean 000\.pooled",
    ),
    "deeper": (
        more("001.block_11", POOLED),
        r"there is no '001\.block_11'; did you mean 001\.block_1",
    ),
    "unknown picture": (
        more("010.pooled", POOLED),
        r"there is no '010\.pooled'; did you mean 00\d\.pooled",
    ),
    "twice": (more("0.pooled", POOLED), r"there is no '0\.pooled'"),
    "batch too": (more("pooled", np.zeros((10, 32))), r"PORT holds \d+\.pooled twice, once in "),
    "short batch": (more("pooled", np.zeros((9, 32))), r"pooled: a batch has 10 pictures; got 9"),
    "transposed": (
        in_port("001.norm", lambda x: x.T),
        r"got \(32, 64\), which fits if it is transp",
    ),
    "too few": (
        in_port("001.norm", lambda x: x[:-1]),
        r"001\.norm must have shape \(64, 32\); got",
    ),
    "nan": (in_port("001.norm", lambda x: x * np.nan), r"001\.norm must hold finite numbers"),
    "grid 0": (in_port("001.grid", lambda x: 0 * x), r"must hold whole numbers from 1 on"),
    "other table": (in_port("table", lambda x: 2 * x), r"its table is not the reference's"),
    "empty": (content(lambda whole: None), r"PORT holds no stages: write stages\.safetensors, or"),
    "cut": (content(lambda whole: whole[:-9]), r"stages\.safetensors is no whole safetensors file"),
    "trailing": (content(lambda whole: whole + b"x"), r"is no whole safetensors file"),
    "both kinds": (
        both_kinds,
        r"holds stages\.safetensors and 1 \.npy files: remove one of the two",
    ),
    "words": (
        npy(lambda file: np.save(file, WORD)),
        r"must hold finite numbers; got NaN, infinity",
    ),
    "npz": (npy(archive), r"001\.pooled\.npy is no whole \.npy file \(it is an archive\)"),
    "4 TB": (npy(four_terabytes), r"001\.pooled\.npy is no whole \.npy file"),
    "trailing npy": (npy(trailing), r"is no whole \.npy file \(bytes follow the array\)"),
    "pipe": (npy(os.mkfifo), r"PORT holds no file 001\.pooled\.npy"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_compared_is_told_in_a_line(case, reference, port, tmp_path, compare):
    spoiled, words = UNUSABLE[case]
    spoiled(reference, port)
    start = time.perf_counter()
    status, printed = compare(reference, port, "--json", str(tmp_path / "figures.json"))
    assert status == 2
    assert len(printed.splitlines()) == 1 and re.search(words, printed), printed
    assert time.perf_counter() - start < 2
    assert not (tmp_path / "figures.json").exists()
