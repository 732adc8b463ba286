"""``naflex-fast record`` writes the stages of a model, whole or not at all."""

import numpy as np
import pytest
from PIL import Image

from tests.support import tiny_siglip2
from tests.support.checks import full_disk
from tests.support.running import ran
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.measure import output
from vit_ports import mistakes
from vit_ports.compare import compare_folders
from vit_ports.format import read_recording, sampled

MODEL = ["--model", f"{tiny_siglip2.FAMILY}.v2_webli", "--random-weights"]
SMALL = ["--model-kwargs", "depth=2", "embed_dim=24", "num_heads=2", "patch_size=8"]
TINY = ["--model-kwargs", *(f"{key}={value}" for key, value in tiny_siglip2.TIMM_SIZES.items())]
FEW = ("bicubic", "bgr", "relu", "block_0_left_out", "block_1_left_out")


@pytest.fixture(autouse=True)
def few_mistakes(monkeypatch):
    """``ports/tests/test_mistakes.py`` has them all."""
    every = mistakes.mistakes_of

    def few(tower, depth):
        return [one for one in every(tower, depth) if one.name in FEW]

    monkeypatch.setattr(mistakes, "mistakes_of", few)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, picture in enumerate(tiny_siglip2.smooth_pictures([(90, 60), (40, 120)])):
        picture.save(folder / f"{number}.png")
    return str(folder)


@pytest.fixture
def record(images, tmp_path, capsys):
    """The exit status, the last line of what was said, and the folder of a recording."""

    def record(*options, out=tmp_path / "REF"):
        given = ["record", "--images", images, "--max-seq-len", "16", "--out", str(out), *options]
        status = main(given)
        printed, errors = capsys.readouterr()
        lines = (printed or errors).strip().splitlines()
        return status, lines[-1], out

    return record


def test_a_recording_is_of_what_was_given_and_says_so(record, images):
    status, said, out = record(*MODEL, *SMALL)
    assert status == 0
    assert said.startswith(f"written: {out}: 2 pictures, 4 known mistakes;")
    read = read_recording(out)
    about = read.about
    assert about["written_by"]["program"] == "naflex-fast record"
    assert len(about["weights"]["sha256"]) == 64
    numbers = [about[name] for name in ("patch_size", "max_patches", "heads", "table_size")]
    assert numbers == [8, 16, 2, [16, 16]]
    given = Image.open(f"{images}/1.png")
    assert given.tobytes() == Image.open(out / "pictures" / "001.png").tobytes()
    assert {one["name"] for one in about["mistakes"]} == {*FEW} - {"bicubic"}  # timm's own
    left_out = sampled(read.stages[1]["position_embedding"])
    assert np.allclose(read.mistakes["block_0_left_out/001.block_0"], left_out, atol=1e-6)


def test_without_mistakes_the_stages_alone_are_written(record, monkeypatch, tmp_path):
    monkeypatch.setattr(mistakes, "with_mistakes", None)
    mean = "pretrained_cfg_overlay={'mean':(0.4,0.5,0.6)}"
    status, said, out = record(*MODEL, *SMALL, mean, "--no-mistakes", out=tmp_path / "new" / "REF")
    assert status == 0 and ", 0 known mistakes;" in said
    recording = read_recording(out)
    assert recording.mistakes == {}
    assert recording.about["mean"] == pytest.approx([0.4, 0.5, 0.6], abs=1e-6)


def test_a_folder_that_is_there_is_not_replaced(record):
    _, _, out = record(*MODEL, *SMALL, "--no-mistakes")
    status, said, _ = record(*MODEL, *SMALL)
    assert status == 2 and said.endswith(f"{out} is there already")


def test_on_a_full_disk_nothing_is_left(record, tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    with full_disk(20_000):
        status, said, _ = record(*MODEL, *SMALL, "--no-mistakes", out=folder / "REF")
    assert status == 2 and "File too large" in said
    assert list(folder.iterdir()) == []


OTHER_TOWERS = {
    "pos_embed=none": "no NaFlex tower of SigLIP-2: it lacks embeds.pos_embed (1); it also has none",
    "reg_tokens=4": "no NaFlex tower of SigLIP-2: it lacks none; it also has embeds.reg_token (1)",
    "pos_embed_grid_size=(4,6)": "its position table has 4 x 6 cells",
}


@pytest.mark.parametrize("other", OTHER_TOWERS)
def test_another_tower_is_told(other, record):
    status, said, out = record(*MODEL, *SMALL, other)
    assert status == 2 and OTHER_TOWERS[other] in said
    assert not out.exists()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("siglip2")
    tiny_siglip2.whole_model().save_pretrained(folder)
    transformers.Siglip2ImageProcessor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(weights, images, tmp_path_factory):
    """What transformers gives."""
    pytest.importorskip("torchvision")
    out = tmp_path_factory.mktemp("theirs") / "REF"
    library = ["--library", "transformers", "--max-seq-len", "16"]
    given = ["record", *MODEL[:2], *TINY, "--checkpoint", str(weights), "--images", images]
    assert main([*given, "--out", str(out), *library]) == 0
    return out


def test_both_libraries_record_the_same_but_for_the_filter_of_the_resize(record, weights, theirs):
    model = [*MODEL[:2], *TINY, "--checkpoint", str(weights), "--no-mistakes"]
    reference = read_recording(theirs)
    assert reference.about["written_by"]["pipeline"].startswith("transformers ")
    assert reference.about["filter"] == "bilinear"
    _, _, ours = record(*model, "--interpolation", "bilinear")
    found = compare_folders(theirs, ours)
    assert (found.first, found.not_written) == (None, [])
    _, _, ours = record(*model, out=ours.with_name("bicubic"))
    assert compare_folders(theirs, ours).reason.words == "pictures resized by bicubic"


def test_with_anothers_pixels_the_towers_alone_are_compared(weights, theirs, tmp_path, capsys):
    given = ["record", *MODEL[:2], *TINY, "--checkpoint", str(weights)]
    given += ["--pixels-of", str(theirs)]
    ours = tmp_path / "ours"
    with ran("grid_sample"):
        assert main([*given, "--out", str(ours), "--mode", "grid_sample"]) == 0
    found = compare_folders(theirs, ours)
    assert found.first.stage == "position_embedding"
    assert [row.share for row in found.rows[:2]] == [0, 0]
    made, right = read_recording(ours).about, read_recording(theirs).about
    for key in ("pictures", "mean", "std", "filter", "max_patches"):
        assert made[key] == right[key]
    assert {one["name"] for one in made["mistakes"]} >= {"bicubic", "relu"}

    # What is not there, or of another size.
    other = ["record", *MODEL, *SMALL, "--pixels-of", str(theirs), "--out", str(tmp_path / "new")]
    assert main(other) == 2
    assert "its patches have a side of 16, the model's of 8" in capsys.readouterr().err
    (theirs / "pictures" / "001.png").rename(theirs / "pictures" / "gone")
    assert main([*given, "--out", str(tmp_path / "new")]) == 2
    assert "are not those of its recording.json" in capsys.readouterr().err
    (theirs / "pictures" / "gone").rename(theirs / "pictures" / "001.png")


def test_without_vit_ports_one_line_says_how_to_get_it(record, monkeypatch):
    monkeypatch.setattr("timm_naflex_fast.commands.cli.record.find_spec", lambda name: None)
    status, said, _ = record(*MODEL, *SMALL)
    assert status == 2 and said.endswith("in this repository: pip install . ./ports")


def test_what_cannot_be_done_is_told_before_the_work(record, tmp_path, monkeypatch):
    given = [*MODEL, *SMALL]
    theirs = [*given, "--library", "transformers"]
    _, said, _ = record(*theirs, "--interpolation", "bicubic")
    assert said.endswith("--interpolation goes with --library timm")
    _, said, _ = record(*theirs)
    assert said.endswith("needs --checkpoint: its settings lie beside it")
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    status, said, out = record(*theirs)
    assert status == 2 and said.endswith(
        "needs transformers, torchvision: pip install transformers torchvision"
    )
    assert not out.exists()
