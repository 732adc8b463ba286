"""``naflex-fast record`` writes the stages of a model, whole or not at all."""

import resource
import stat
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from tests.support import tiny_recordings, tiny_siglip2
from timm_naflex_fast.commands.cli import against
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.recordings import mistakes
from timm_naflex_fast.commands.recordings.compare import compare_folders
from timm_naflex_fast.commands.recordings.format import read_recording, sampled

MODEL = ["--model", f"{tiny_siglip2.FAMILY}.v2_webli", "--random-weights"]
SMALL = ["--model-kwargs", "depth=2", "embed_dim=24", "num_heads=2", "patch_size=8"]
STAGES = "grid pixels patch_embedding position_embedding block_0 block_1 norm pooled".split()
LIST = """
[picture]
bgr: colours in the order blue, green, red
- picture.convert("RGB")
+ Image.fromarray(np.asarray(picture.convert("RGB"))[..., ::-1])
[block_0]
relu: ReLU in place of GELU
- return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
+ return np.maximum(x, 0)
"""
TYPED = """
[norm]
mine: the last LayerNorm is doubled
- return layer_norm(x, weights, "post_layernorm")
+ normed = layer_norm(x, weights, "post_layernorm")
+ return 2 * normed
"""


@pytest.fixture(autouse=True)
def few_mistakes(monkeypatch, tmp_path):
    """Two of them: ``tests/commands/recordings/test_mistakes.py`` has them all."""
    few = tmp_path / "mistakes.diff"
    few.write_text(LIST)
    monkeypatch.setattr(mistakes.read_mistakes, "__defaults__", (few,))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    pictures = tiny_recordings.smooth_pictures([(90, 60), (40, 120)])
    for number, picture in enumerate(pictures):
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


def test_a_recording_is_of_what_was_given_and_says_so(record, images, tmp_path):
    mine = tmp_path / "mine.diff"
    mine.write_text("[norm]\nmine: no last norm\n- linear(\n+ linear(\n")
    status, said, _ = record(*MODEL, *SMALL, "--mistakes", str(mine))
    assert status == 2 and "mine: 'linear(' is" in said

    mine.write_text(TYPED)
    status, said, out = record(*MODEL, *SMALL, "--mistakes", str(mine))
    assert status == 0
    assert said.startswith(f"written: {out}: 2 pictures, 8 stages, 5 known mistakes (0 more do not")
    read = read_recording(out)
    about = read.about
    assert about["written_by"]["program"] == "naflex-fast record"
    assert len(about["weights"]["sha256"]) == 64
    assert about["patch_size"] == 8
    assert about["max_patches"] == 16
    assert about["heads"] == 2
    assert about["table_size"] == [16, 16] == list(read.table.shape[:2])
    assert read.order == STAGES
    for number in range(2):
        given = Image.open(f"{images}/{number}.png")
        kept = Image.open(out / f"pictures/{number:03}.png")
        assert np.array_equal(np.array(given), np.array(kept))
    names = [one["name"] for one in about["mistakes"]]
    assert names == ["bgr", "relu", "block_0_left_out", "block_1_left_out", "mine"]
    doubled = sampled(2 * read.stages[1]["norm"])
    assert np.allclose(read.mistakes["mine/001.norm"], doubled, atol=1e-4)
    for one in about["mistakes"]:
        assert one["pictures"] == [0, 1]
        assert f"{one['name']}/001.{one['stage']}" in read.mistakes


def test_without_mistakes_the_stages_alone_are_written_for_others_to_read(record, monkeypatch):
    monkeypatch.setattr(mistakes, "known_mistakes", None)
    status, said, out = record(*MODEL, *SMALL, "--no-mistakes")
    assert status == 0 and ", 0 known mistakes (0 more" in said
    read = read_recording(out)
    assert read.about["mistakes"] == [] and read.mistakes == {}
    for file in [out, *out.rglob("*")]:
        assert file.stat().st_mode & stat.S_IROTH, file


def test_force_replaces_a_recording_and_nothing_else(record, tmp_path):
    _, _, out = record(*MODEL, *SMALL, "--no-mistakes")
    old = out / "of the old one.npy"
    old.write_bytes(b"")
    status, said, _ = record(*MODEL, *SMALL, "--no-mistakes")
    assert status == 2 and old.exists()
    assert said.endswith(f"{out} is there already; --force replaces it")

    status, _, _ = record(*MODEL, *SMALL, "--no-mistakes", "--force")
    assert status == 0 and not old.exists()
    written = ["mistakes.safetensors", "pictures", "recording.json", "stages.safetensors"]
    assert sorted(file.name for file in out.iterdir()) == written

    (out / "recording.json").rename(out / "thesis.json")
    status, said, _ = record(*MODEL, *SMALL, "--force")
    assert status == 2 and (out / "thesis.json").exists()
    assert said.endswith(f"{out} is no recording, so --force does not replace it")


@contextmanager
def full_disk():
    """No file may become larger than 20 kB: then writing fails as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_on_a_full_disk_nothing_is_left(record, tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    with full_disk():
        status, said, _ = record(*MODEL, *SMALL, "--no-mistakes", out=folder / "REF")
    assert status == 2 and "File too large" in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "other",
    ["pos_embed=none", "reg_tokens=4", "pretrained_cfg_overlay={'mean':(0.4,0.5,0.5)}"],
)
def test_a_model_of_which_there_is_no_recording_is_told(other, record):
    status, said, out = record(*MODEL, *SMALL, other)
    assert status == 2
    assert "is of another design than SigLIP-2's; valid: pixels from -1 to 1 " in said
    assert not out.exists()


def test_of_another_tower_the_stages_alone_are_recorded(record):
    other = [*MODEL, *SMALL, "pos_embed_grid_size=(4,6)"]
    status, said, _ = record(*other)
    assert status == 2
    assert "--no-mistakes records without them (its position table has 4 x 6 cells" in said
    status, _, out = record(*other, "--no-mistakes")
    assert status == 0
    assert read_recording(out).table.shape[:2] == (4, 6)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("siglip2")
    tiny_siglip2.whole_model().save_pretrained(folder)
    return folder


def test_both_libraries_record_the_same_and_transformers_needs_no_name(record, weights, tmp_path):
    pytest.importorskip("torchvision")
    status, _, theirs = record("--checkpoint", str(weights), "--library", "transformers")
    assert status == 0
    model = [*MODEL[:2], "--checkpoint", str(weights)]
    _, _, ours = record(*model, "--interpolation", "bilinear", out=tmp_path / "timm")
    reference = read_recording(theirs)
    assert reference.about["written_by"]["pipeline"].startswith("transformers ")
    assert reference.about["filter"] == "bilinear"
    found = compare_folders(theirs, ours)
    assert (found.first, found.not_written) == (None, [])


def test_what_cannot_be_done_is_told_before_the_work(record, tmp_path, monkeypatch):
    theirs = ["--library", "transformers"]
    status, said, _ = record(*MODEL, *SMALL, *theirs, "--interpolation", "bicubic")
    assert status == 2 and said.endswith("--mode and --interpolation go with --library timm")
    status, said, _ = record(*MODEL, *SMALL, out=tmp_path / "no" / "REF")
    assert status == 2 and said.endswith(f"{tmp_path / 'no'} is no folder")
    monkeypatch.setattr(against, "find_spec", lambda name: None)
    status, said, out = record(*MODEL, *SMALL, *theirs)
    assert status == 2 and said.endswith("needs transformers: pip install transformers")
    assert not out.exists()
