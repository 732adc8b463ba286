"""``vit-ports compare`` from two folders to a verdict; what cannot be compared is told in a line."""

import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from on_the_kit import port_with_weights_in
from safetensors.numpy import load_file, save_file

from vit_ports.cli.main import main
from vit_ports.format import read_about

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "kit"


@pytest.fixture
def folders(tmp_path):
    """A copy of the kit, and a right port, which a test may spoil."""
    reference, port = tmp_path / "REF", tmp_path / "PORT"
    reference.mkdir()
    port.mkdir()
    # The contents alone: a checkout may be read-only.
    shutil.copyfile(KIT / "stages.safetensors", port / "stages.safetensors")
    for file in filter(Path.is_file, KIT.iterdir()):
        shutil.copyfile(file, reference / file.name)
    return tmp_path


@pytest.fixture
def port(folders):
    return folders / "PORT"


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
    made = change(arrays.pop(name, np.zeros(10)))
    if made is not None:
        arrays[name] = np.ascontiguousarray(made)
    save_file(arrays, folder / "stages.safetensors")


# Verdicts.


def test_a_port_that_parts_has_status_1_and_figures_as_json(port, tmp_path, compare):
    spoil(port, "001.block_1", lambda x: 3 * x)
    file = tmp_path / "figures.json"
    status, printed = compare(KIT, port, "--json", str(file))
    assert status == 1
    assert "parts at block_1, in 1 of 10 pictures: " in printed
    found = json.loads(file.read_text())
    assert (found["first"], found["precision"], found["not_compared"]) == ("block_1", "float32", [])
    assert {"command", "vit_ports", "date"} <= set(found)
    assert found["reason"]["pictures"] == [1]
    (row,) = [row for row in found["stages"] if row["parting"]]
    assert (row["stage"], row["parting"], row["compared"]) == ("block_1", [1], 10)
    assert all(sentence in printed for sentence in found["verdict"])


def test_on_a_full_disk_the_old_figures_stay(port, tmp_path, compare):
    file = tmp_path / "figures.json"
    file.write_text("old")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
    try:
        status, printed = compare(KIT, port, "--json", str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert status == 2 and "figures.json cannot be written: File too large" in printed
    assert file.read_text() == "old" and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8"])
def test_the_precision_is_said_and_the_hint_names_it(precision, port, compare):
    arrays = {}
    for number, own in enumerate(port_with_weights_in(precision)):
        for stage, numbers in own.items():
            arrays[f"{number:03}.{stage}"] = np.ascontiguousarray(numbers)
    save_file(arrays, port / "stages.safetensors")
    status, printed = compare(KIT, port)
    assert status == 1 and f"as large as {precision}'s rounding" in printed
    assert f"say --precision {precision}\n" in printed
    status, printed = compare(KIT, port, "--precision", precision)
    assert status == 0
    assert f"equal within {precision}'s rounding, on 10 pictures: " in printed


def test_a_stage_may_be_left_out_and_a_picture_if_it_is_meant(port, compare):
    for number in range(10):
        spoil(port, f"{number:03}.grid", lambda x: None)
    status, printed = compare(KIT, port)
    assert status == 0 and printed.endswith("not written by the port, so not compared: grid\n")
    spoil(port, "003.norm", lambda x: None)
    spoil(port, "007.pooled", lambda x: None)
    for options, wanted in (([], 2), (["--partial"], 0)):
        status, printed = compare(KIT, port, *options)
        assert status == wanted and printed.startswith("missing: 2 pictures, the first is 003")


def test_without_a_port_the_known_mistakes_are_printed(capsys):
    assert main(["compare", str(KIT)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    names = [mistake["name"] for mistake in read_about(KIT)["mistakes"]]
    assert [row.split()[0] for row in rows] == names


# What cannot be compared is told in a line.


@pytest.fixture
def refused(folders, compare):
    """Asserts that the folders cannot be compared, and that these words say why."""

    def refused(words):
        status, printed = compare(folders / "REF", folders / "PORT")
        assert status == 2 and len(printed.splitlines()) == 1
        assert words in printed

    return refused


# A part of recording.json, what stands there instead, and what is said.
CHANGED = [
    ('"version": 2', '"version": 1', "it is of version 1, and this release reads 2"),
    ('"file": "pictures/000.png"', '"file": 5', "TypeError("),
    ('"patch_size": 8', '"patch_size": 0', "0 is no number above 0"),
    ('"mistakes": [', '"mistakes": null, "others": [', "TypeError("),
    ('"words": "the picture', '"wards": "the picture', "KeyError('words')"),
    ('"name": "pixels"', '"name": "grid"', "0 by number at grid is no limit of float32's rounding"),
    ('"name": "grid"', '"name": "grids"', "the first stage is not the grid"),
    ('"tf32": {', '"tf33": {', "has limits of other precisions than the grid"),
    ('"token": 3e-05', '"token": 0', "0 by token at block_0 is no limit of float32's rounding"),
    ('"token": 3e-05', '"token": 1e-3', "rounding; valid: above 0, 0.0005 at most"),
    ('"limits": {', '"limits": 5, "others": {', "AttributeError("),
    ('"file": "pictures/000.png"', '"file": "../000.png"', "'../000.png' is outside of the rec"),
    ('"words": "the picture', '"words": "\\u001b[2J', "holds characters that cannot be printed"),
    ('"token": 3e-05', '"token": "3e-05"', "TypeError("),
    ("{", "[" * 100_000, "does not describe a recording ("),
]


@pytest.mark.parametrize(("part", "other", "words"), CHANGED)
def test_another_recording_json(part, other, words, folders, refused):
    file = folders / "REF" / "recording.json"
    text = file.read_text()
    assert part in text
    file.write_text(text.replace(part, other, 1))
    refused(words)


# A folder, an array, what becomes of it, and what is said.
SPOILED = [
    ("PORT", "001.norm", lambda x: x * np.nan, "001.norm must hold finite numbers; got NaN"),
    ("PORT", "003.norm", lambda x: x[:-1], "003.norm must hold numbers in shape (60, 32); got fl"),
    ("PORT", "0.poo\nled", np.copy, r"no '0.poo\nled'; valid: 000 to 009,"),
    ("PORT", "norm", np.copy, "one batch"),
    ("REF", "003.norm", np.ravel, "003.norm must hold numbers in shape"),
    ("REF", "003.norm", lambda x: None, "must hold every stage of every picture"),
    ("REF", "table", lambda x: x[..., :3], "a table in shape (12, 12, 32); got (12, 12, 3)"),
]


@pytest.mark.parametrize(("folder", "name", "change", "words"), SPOILED)
def test_another_array(folder, name, change, words, folders, refused):
    spoil(folders / folder, name, change)
    refused(words)


def test_a_folder_that_is_not_there(folders, port, refused):
    port.rename(folders / "elsewhere")
    refused("there is no folder ")


def archive(file):
    with file.open("wb") as opened:
        np.savez(opened, numbers=np.zeros(32))


def four_terabytes(file):
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    file.write_bytes(b"\x93NUMPY\x01\x00v\x00" + head.ljust(117).encode() + b"\n")


def trailing(file):
    np.save(file, np.zeros(32))
    file.write_bytes(file.read_bytes() + b"more")


def text(file):
    np.save(file, ["a"] * 32)


class Attack:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def pickled(file):
    np.save(file, np.array([Attack()]), allow_pickle=True)


@pytest.mark.parametrize("write", [pickled, archive, four_terabytes, trailing, text, os.mkfifo])
def test_a_damaged_file(write, port, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(port / "001.pooled.npy")
    refused("and not both")
    (port / "stages.safetensors").unlink()
    refused("001.pooled")
    assert not os.path.exists("unpickled")


def test_a_file_that_is_cut_off_or_not_there(folders, port, refused):
    whole = port / "stages.safetensors"
    whole.write_bytes(whole.read_bytes()[:-9])
    refused("is no whole file of arrays (")
    whole.unlink()
    refused("PORT must hold stages.safetensors, or")
    (folders / "REF" / "stages.safetensors").unlink()
    refused("there is no file ")
