"""siglip2_embed.py with a tiny tower of random weights: what it writes, resuming, refusing, and bad images."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import siglip2_embed
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support import tiny_siglip
from tests.support.running import ran
from timm_naflex_fast.measure.images import NaFlexImages, image_files, image_sources
from timm_naflex_fast.measure.models import load_model

EXAMPLES = Path(siglip2_embed.__file__).parent
PHOTOS = ["a.jpg", "b.png", "d.webp", "more/c.jpg"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "random_tiny.safetensors"
    torch.manual_seed(1)
    model = timm.create_model(tiny_siglip.NAME)
    torch.nn.init.normal_(model.embeds.pos_embed)
    save_file(model.state_dict(), file)
    return file


def arguments(photos, out, weights, *more):
    fixed = ["--model", tiny_siglip.NAME, "--checkpoint", weights, "--max-seq-len", 36, "--batch-size", 2]
    return [str(part) for part in (photos, "--out", out, *fixed, "--device", "cpu", *more)]


def read(out):
    with safe_open(out, "pt") as opened:
        metadata = {key: json.loads(value) for key, value in opened.metadata().items()}
        return metadata["paths"], opened.get_tensor("embeddings"), metadata


def pooled_by_timm(photos, weights, dtype=torch.float32):
    """Unpatched timm, one image at a time, in the order of the paths."""
    model = load_model(tiny_siglip.NAME, weights)[0].to(dtype)
    folder = NaFlexImages(image_sources(photos), model, max_seq_len=36, batch_size=1)
    with torch.inference_mode():
        rows = [model(batch | {"patches": batch["patches"].to(dtype)}) for batch, _ in folder]
    names = [path.relative_to(photos).as_posix() for path in image_files(photos)]
    return torch.cat([row for _, row in sorted(zip(names, rows))])


@ran("matmul")
@pytest.mark.parametrize(("workers", "dtype", "atol"), [(0, "bfloat16", 0.02), (1, "float32", 1e-5)])
def test_embeddings_are_timms(photos, weights, tmp_path, capsys, workers, dtype, atol):
    out = tmp_path / "new" / "folder" / "out.safetensors"
    assert siglip2_embed.main(arguments(photos, out, weights, "--workers", workers, "--dtype", dtype)) == 0
    paths, embeddings, metadata = read(out)
    assert paths == PHOTOS
    want = pooled_by_timm(photos, weights, getattr(torch, dtype))
    torch.testing.assert_close(embeddings, want, atol=atol, rtol=atol)
    assert metadata["skipped"] == {} and metadata["settings"]["model"] == tiny_siglip.NAME
    assert os.listdir(out.parent) == [out.name]
    assert "4 embeddings, 0 images skipped" in capsys.readouterr().out


@pytest.mark.slow
@ran("matmul")
def test_killed_in_the_middle_and_continued(photos, weights, tmp_path, capsys, monkeypatch):
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    assert siglip2_embed.main(arguments(photos, whole, weights)) == 0
    environment = {**os.environ, "DIE_AT": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent), *sys.path])
    command = [sys.executable, tiny_siglip.__file__, *arguments(photos, out, weights, "--save-every", 0)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL and not out.exists(), killed.stderr
    assert len(list(Path(f"{out}.parts").glob("*.safetensors"))) == 1
    (Path(f"{out}.parts") / "00000001.safetensors.unfinished").write_bytes(b"half")  # killed while writing
    seen, embed = [], siglip2_embed.embed
    monkeypatch.setattr(siglip2_embed, "embed", lambda *given: seen.append(given[1]) or embed(*given))
    assert siglip2_embed.main(arguments(photos, out, weights)) == 0
    assert "2 images to embed, 2 done before" in capsys.readouterr().out
    assert sum(len(batch["patches"]) for batch in seen) == 2
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "photos", "whole.safetensors"]
    assert read(out)[0] == read(whole)[0]
    torch.testing.assert_close(read(out)[1], read(whole)[1], atol=1e-5, rtol=1e-5)


@ran("matmul")
def test_stopped_by_an_error_keeps_what_was_done(photos, weights, tmp_path, monkeypatch):
    out, embed, calls = tmp_path / "out.safetensors", siglip2_embed.embed, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return embed(*given)

    monkeypatch.setattr(siglip2_embed, "embed", interrupted)
    assert siglip2_embed.main(arguments(photos, out, weights)) == 130  # as a shell reports Ctrl-C
    assert [len(read(part)[0]) for part in Path(f"{out}.parts").glob("*")] == [2]
    assert siglip2_embed.main(arguments(photos, out, weights)) == 0
    assert len(calls) == 3 and len(read(out)[0]) == 4


@ran("matmul")
def test_finished_file_takes_in_new_images_and_loses_none(photos, weights, tmp_path):
    out = tmp_path / "out.safetensors"
    (photos / "d.webp").rename(tmp_path / "d.webp")
    assert siglip2_embed.main(arguments(photos, out, weights)) == 0
    first = read(out)
    (tmp_path / "d.webp").rename(photos / "0.webp")
    (photos / "a.jpg").unlink()
    assert siglip2_embed.main(arguments(photos, out, weights)) == 0
    paths, embeddings, _ = read(out)
    assert paths == ["0.webp", *first[0]]
    assert torch.equal(embeddings[1:], first[1])


@ran("matmul")
@pytest.mark.parametrize("finished", [True, False])
def test_refuses_to_mix(photos, weights, tmp_path, capsys, finished):
    out = tmp_path / "out.safetensors"
    assert siglip2_embed.main(arguments(photos, out, weights)) == 0
    if not finished:
        Path(f"{out}.parts").mkdir()
        out.rename(Path(f"{out}.parts") / "00000000.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model(tiny_siglip.NAME).state_dict(), other)
    capsys.readouterr()
    for changed, word in (
        (arguments(photos, out, other), "weights_sha256"),
        (arguments(photos, out, weights, "--max-seq-len", 16), "max_seq_len 36 there, 16 now"),
        (arguments(photos, out, weights, "--dtype", "bfloat16"), "dtype float32 there, bfloat16 now"),
    ):
        assert siglip2_embed.main(changed) == 2
        err = capsys.readouterr().err
        assert word in err and "choose another --out" in err and err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors") if path != other}


def test_refuses_a_file_of_something_else(photos, weights, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    for make in (lambda: save_file({"x": torch.zeros(1)}, out), lambda: out.write_text("no safetensors")):
        make()
        before = out.read_bytes()
        assert siglip2_embed.main(arguments(photos, out, weights)) == 2
        assert "was not written by siglip2_embed.py" in capsys.readouterr().err and out.read_bytes() == before


@ran("matmul")
def test_unreadable_images_are_listed_and_skipped(photos, weights, tmp_path, capsys):
    (photos / "broken.png").write_text("no image")
    (photos / "cut.jpg").write_bytes((photos / "a.jpg").read_bytes()[:400])
    out = tmp_path / "out.safetensors"
    assert siglip2_embed.main(arguments(photos, out, weights, "--batch-size", 1)) == 0
    paths, _, metadata = read(out)
    assert paths == PHOTOS and set(metadata["skipped"]) == {"broken.png", "cut.jpg"}
    assert "not readable as an image: broken.png" in capsys.readouterr().err


def test_a_folder_of_unreadable_images(weights, tmp_path, capsys):
    (tmp_path / "x.png").write_text("")
    assert siglip2_embed.main(arguments(tmp_path, tmp_path / "out.safetensors", weights)) == 2
    assert "none of the 1 images" in capsys.readouterr().err and not (tmp_path / "out.safetensors").exists()
