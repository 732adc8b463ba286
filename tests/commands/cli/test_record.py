"""``naflex-fast record`` writes the stages of a model, whole or not at all."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.support import tiny_recordings, tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast.commands.cli import record as command
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.recordings import mistakes
from timm_naflex_fast.commands.recordings.compare import compare_recordings
from timm_naflex_fast.commands.recordings.format import read_port, read_recording

MODEL = ["--model", f"{tiny_siglip2.FAMILY}.v2_webli", "--random-weights"]
SMALL = ["--model-kwargs", "depth=2", "embed_dim=24", "num_heads=2", "patch_size=8"]
STAGES = "grid pixels patch_embedding position_embedding block_0 block_1 norm pooled".split()


@pytest.fixture(autouse=True)
def few_mistakes(monkeypatch):
    """One of each step: ``tests/commands/recordings/test_mistakes.py`` has them all."""
    for where, entries in mistakes.MISTAKES.items():
        monkeypatch.setitem(mistakes.MISTAKES, where, entries[:1])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, picture in enumerate(tiny_recordings.smooth_pictures([(90, 60), (40, 120)])):
        picture.save(folder / f"{number}.png")
    return str(folder)


@pytest.fixture
def record(images, tmp_path, capsys):
    """The exit status, what was said, and the folder of a recording.

    Said is the line that tells what was written, or else the last one.
    """

    def record(*options, out=tmp_path / "REF"):
        given = ["record", "--images", images, "--max-seq-len", "16", "--out", str(out), *options]
        status = main(given)
        printed = capsys.readouterr()
        lines = (printed.out + printed.err).strip().splitlines()
        if status == 0:
            (said,) = [line for line in lines if line.startswith("written: ")]
            return status, said, out
        return status, lines[-1], out

    return record


def test_a_recording_says_what_was_recorded_by_whom(record):
    status, said, out = record(*MODEL, *SMALL)
    read = read_recording(out)
    about = read.about
    assert status == 0
    count = len(about["mistakes"])
    assert count >= 8
    assert said.startswith(f"written: {out}: 2 pictures, 8 stages, {count} known mistakes (")
    assert (about["format"], about["version"]) == ("naflex-recording", 1)
    assert about["written_by"]["program"] == "naflex-fast record"
    assert about["written_by"]["versions"]["timm"]
    assert len(about["weights"]["sha256"]) == 64
    assert (about["patch_size"], about["max_patches"], about["heads"]) == (8, 16, 2)
    assert about["table_size"] == [16, 16] == list(read.table.shape[:2])
    assert [one["name"] for one in about["stages"]] == STAGES == read.order
    for number, picture in enumerate(about["pictures"]):
        assert picture["name"].endswith(f"{number}.png")
        assert picture["file"] == f"pictures/{number:03}.png"
        assert picture["grid"] == read.stages[number]["grid"].tolist()
    for stage in about["stages"]:
        assert {"float32", "float16", "bfloat16"} <= {*stage["limits"]} or stage["name"] == "grid"


def test_its_pictures_are_those_that_were_given(record, images):
    _, _, out = record(*MODEL, *SMALL)
    for number in range(2):
        with Image.open(f"{images}/{number}.png") as given:
            with Image.open(out / f"pictures/{number:03}.png") as kept:
                assert np.array_equal(np.array(given), np.array(kept))


def test_each_kept_mistake_is_of_the_stage_that_it_says(record):
    _, _, out = record(*MODEL, *SMALL)
    read = read_recording(out)
    for one in read.about["mistakes"]:
        assert f"{one['name']}/{one['picture']:03}.{one['stage']}" in read.mistakes


def test_a_folder_that_is_there_is_kept_without_force(record):
    _, _, out = record(*MODEL, *SMALL)
    before = (out / "recording.json").read_bytes()
    status, said, _ = record(*MODEL, *SMALL)
    assert status == 2
    assert said.endswith(f"{out} is there already; --force replaces it")
    assert (out / "recording.json").read_bytes() == before


def test_force_replaces_a_recording(record):
    _, _, out = record(*MODEL, *SMALL)
    (out / "of the old one.npy").write_bytes(b"")
    status, _, _ = record(*MODEL, *SMALL, "--force")
    assert status == 0
    found = sorted(file.name for file in out.iterdir())
    assert found == [
        "mistakes.safetensors",
        "pictures",
        "recording.json",
        "stages.safetensors",
    ]


def test_force_replaces_nothing_else(record, tmp_path):
    (tmp_path / "REF").mkdir()
    (tmp_path / "REF" / "thesis.txt").write_text("years of work")
    status, said, out = record(*MODEL, *SMALL, "--force")
    assert status == 2
    assert said.endswith(f"{out} is no recording, so --force does not replace it")
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("is_there", [False, True])
def test_it_is_written_whole_or_not_at_all(is_there, record, tmp_path, monkeypatch):
    if is_there:
        record(*MODEL, *SMALL)
    before = sorted(file.name for file in tmp_path.rglob("*"))

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    status, said, _ = record(*MODEL, *SMALL, "--force")
    assert status == 2
    assert "No space left on device" in said
    assert sorted(file.name for file in tmp_path.rglob("*")) == before


@ran("matmul")
def test_a_mode_resamples_the_table(record):
    _, _, out = record(*MODEL, *SMALL, "--mode", "matmul")
    assert read_recording(out).about["written_by"]["pipeline"] == "timm, matmul"


def test_a_tower_without_a_head_is_recorded_up_to_norm(record):
    status, _, out = record(*MODEL, *SMALL, "global_pool=avg")
    assert status == 0
    assert read_recording(out).order == STAGES[:-1]


OTHER = {
    "naflexvit_base_patch16_gap": r"has 4 class and register tokens, and a recording is of patches",
    "vit_tiny_patch16_224": "has 1 class and register tokens",
    f"{tiny_siglip2.FAMILY} pos_embed=none": "has no position table",
    f"{tiny_siglip2.FAMILY} pos_embed=factorized": "has no position table",
}


@pytest.mark.parametrize("model", OTHER)
def test_a_model_of_which_there_is_no_recording_is_told(model, record):
    name, *more = model.split()
    sizes = ["depth=2", "embed_dim=24", "num_heads=2"]
    status, said, out = record("--model", name, "--random-weights", "--model-kwargs", *sizes, *more)
    assert status == 2
    assert OTHER[model] in said
    assert not out.exists()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("siglip2")
    tiny_siglip2.whole_model().save_pretrained(folder)
    return str(folder)


def test_both_libraries_record_the_same(record, weights, tmp_path):
    pytest.importorskip("torchvision")
    model = [*MODEL[:2], "--checkpoint", weights]
    status, _, theirs = record(*model, "--library", "transformers")
    assert status == 0
    _, _, ours = record(*model, "--interpolation", "bilinear", out=tmp_path / "timm")
    reference = read_recording(theirs)
    assert reference.about["written_by"]["pipeline"].startswith("transformers ")
    assert reference.about["filter"] == "bilinear"
    found = compare_recordings(reference, read_port(ours, reference))
    assert (found.first, found.missing) == (None, [])


@pytest.mark.parametrize("option", ["--mode matmul", "--interpolation bicubic"])
def test_options_of_timm_do_not_go_with_transformers(option, record):
    status, said, out = record(*MODEL, *SMALL, "--library", "transformers", *option.split())
    assert status == 2
    assert said.endswith("--mode and --interpolation go with --library timm")
    assert not out.exists()


def test_a_missing_library_is_told_before_the_work(record, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    status, said, _ = record(*MODEL, *SMALL, "--library", "transformers")
    assert status == 2
    assert said.endswith("--library transformers needs transformers: pip install transformers")


def test_a_parent_that_is_not_there_is_told_before_the_work(record, tmp_path):
    status, said, _ = record(*MODEL, *SMALL, out=tmp_path / "no" / "REF")
    assert status == 2
    assert said.endswith(f"{tmp_path / 'no'} is no folder")


def test_without_images_photos_are_recorded(tmp_path):
    pytest.importorskip("skimage")
    out = tmp_path / "REF"
    given = ["record", *MODEL, *SMALL, "--max-seq-len", "16", "--out", str(out)]
    assert main(given) == 0
    about = json.loads((out / "recording.json").read_text())
    assert len(about["pictures"]) == 5


def test_other_pixels_than_from_minus_1_to_1_are_refused(tmp_path, photos, capsys):
    given = ["record", "--model", "naflexvit_base_patch16_gap", "--random-weights"]
    given += ["--model-kwargs", "embed_dim=32", "depth=1", "num_heads=2"]
    given += ["pretrained_cfg_overlay={'mean': (0.4, 0.5, 0.5)}"]
    assert main([*given, "--images", str(photos), "--out", str(tmp_path / "REF")]) == 2
    assert "a recording holds pixels from -1 to 1" in capsys.readouterr().err
    assert not (tmp_path / "REF").exists()
