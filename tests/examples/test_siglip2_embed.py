"""siglip2_embed.py with a tiny tower of random weights: what it writes, resuming, refusing, and bad
images."""

import json
import os
from pathlib import Path

import pytest
import siglip2_embed
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save, save_file

from tests.support import tiny_siglip
from tests.support.running import ran
from timm_naflex_fast.measure.images import NaFlexImages, image_sources
from timm_naflex_fast.measure.models import load_model

PHOTOS = ["a.jpg", "b.png", "d.webp", "more/c.jpg"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "out.safetensors"


@pytest.fixture
def embed(photos, out, tmp_path):
    """The script, which embeds the photos with weights of a file."""
    torch.manual_seed(1)
    model = timm.create_model(tiny_siglip.NAME)
    torch.nn.init.normal_(model.embeds.pos_embed)
    save_file(model.state_dict(), tmp_path / "tiny.safetensors")
    words = f"--model {tiny_siglip.NAME} --max-seq-len 36 --batch-size 2 --device cpu --checkpoint".split()
    command = [photos, *words, tmp_path / "tiny.safetensors", "--out", out]
    return lambda *more: siglip2_embed.main([str(word) for word in (*command, *more)])


def read(out):
    with safe_open(out, "pt") as opened:
        metadata = {key: json.loads(value) for key, value in opened.metadata().items()}
        return metadata["paths"], opened.get_tensor("embeddings"), metadata


def pooled_by_timm(photos, dtype):
    """Unpatched timm, one image at a time, in the order of the paths."""
    model = load_model(tiny_siglip.NAME, photos.with_name("tiny.safetensors"))[0].to(dtype)
    folder = NaFlexImages(image_sources(photos), model, max_seq_len=36, batch_size=1)
    with torch.inference_mode():
        return torch.cat(
            [model(batch | {"patches": batch["patches"].to(dtype)}) for batch, _ in folder]
        )


@ran("matmul")
@pytest.mark.parametrize(
    ("workers", "dtype", "atol"), [(0, "bfloat16", 0.02), (1, "float32", 1e-5)]
)
def test_embeddings_are_timms(embed, photos, out, capsys, workers, dtype, atol):
    assert embed("--workers", workers, "--dtype", dtype) == 0
    paths, embeddings, metadata = read(out)
    assert paths == PHOTOS and os.listdir(out.parent) == [out.name]
    want = pooled_by_timm(photos, getattr(torch, dtype))
    torch.testing.assert_close(embeddings, want, atol=atol, rtol=atol)
    assert metadata["skipped"] == {} and metadata["settings"]["model"] == tiny_siglip.NAME
    assert "4 embeddings, 0 images skipped" in capsys.readouterr().out


@ran("matmul")
def test_transformers_model(photos, out, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", minversion="5.21")
    tower = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=64,
    )
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**tower)).eval()
    model.save_pretrained(tmp_path / "model")
    (processor := transformers.Siglip2ImageProcessor(max_num_patches=36)).save_pretrained(
        tmp_path / "model"
    )
    words = f"{photos} --library transformers --model {tmp_path / 'model'} --out {out}"
    words += " --max-seq-len 36 --batch-size 3 --device cpu"
    assert siglip2_embed.main(words.split()) == 0
    paths, embeddings, _ = read(out)
    assert paths == PHOTOS
    with torch.inference_mode():
        for path, got in zip(paths, embeddings):
            want = model(
                **processor(Image.open(photos / path).convert("RGB"), return_tensors="pt")
            ).pooler_output[0]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert siglip2_embed.main([*words.split(), "--random-weights"]) == 2
    assert "takes its weights from --model" in capsys.readouterr().err


@ran("matmul")
@pytest.mark.parametrize("save_every", [0, 1000])
def test_stopped_in_the_middle_and_continued(embed, photos, out, capsys, monkeypatch, save_every):
    parts, there, own = Path(f"{out}.parts"), [], siglip2_embed.embed

    def stopped(*arguments):
        there.append(len([*parts.glob("*")]))
        if len(there) == 2:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(siglip2_embed, "embed", stopped)
    assert embed("--save-every", save_every) == 130  # as a shell reports Ctrl-C
    assert there == [0, save_every == 0] and [len(read(part)[0]) for part in parts.glob("*")] == [2]
    (parts / "00000001.safetensors.unfinished").write_bytes(b"half")  # as if killed while writing
    assert (
        embed() == 0
        and "2 images to embed, 2 done before" in capsys.readouterr().out
        and len(there) == 3
    )
    assert os.listdir(out.parent) == [out.name] and read(out)[0] == PHOTOS
    torch.testing.assert_close(
        read(out)[1], pooled_by_timm(photos, torch.float32), atol=1e-5, rtol=1e-5
    )


@ran("matmul")
def test_finished_file_takes_in_new_images_and_loses_none(embed, photos, out, tmp_path):
    (photos / "d.webp").rename(tmp_path / "d.webp")
    assert embed() == 0
    first = read(out)
    (tmp_path / "d.webp").rename(photos / "0.webp")
    (photos / "a.jpg").unlink()
    assert embed() == 0
    paths, embeddings, _ = read(out)
    assert paths == ["0.webp", *first[0]] and torch.equal(embeddings[1:], first[1])


@ran("matmul")
@pytest.mark.parametrize("finished", [True, False])
def test_refuses_to_mix_and_a_file_of_something_else(embed, out, tmp_path, capsys, finished):
    out.parent.mkdir()
    out.write_bytes(other := save({"x": torch.zeros(1)}) if finished else b"no safetensors")
    assert embed() == 2 and out.read_bytes() == other
    assert "was not written by siglip2_embed.py" in capsys.readouterr().err
    out.unlink()
    assert embed() == 0
    if not finished:
        Path(f"{out}.parts").mkdir()
        out.rename(Path(f"{out}.parts") / "00000000.safetensors")
    save_file(timm.create_model(tiny_siglip.NAME).state_dict(), tmp_path / "other.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    capsys.readouterr()
    for changed, word in (
        (["--checkpoint", tmp_path / "other.safetensors"], "weights_sha256"),
        (["--max-seq-len", 16], "max_seq_len 36 there, 16 now"),
        (["--dtype", "bfloat16"], "dtype float32 there, bfloat16 now"),
    ):
        assert embed(*changed) == 2
        err = capsys.readouterr().err
        assert word in err and "choose another --out" in err and err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}


@ran("matmul")
def test_unreadable_images_are_listed_and_skipped(embed, photos, out, capsys):
    (photos / "broken.png").write_text("no image")
    (photos / "cut.jpg").write_bytes((photos / "a.jpg").read_bytes()[:400])
    assert embed("--batch-size", 1) == 0
    paths, _, metadata = read(out)
    assert paths == PHOTOS and set(metadata["skipped"]) == {"broken.png", "cut.jpg"}
    assert "not readable as an image: broken.png" in capsys.readouterr().err
    out.unlink()
    for name in PHOTOS:
        (photos / name).unlink()
    assert embed() == 2 and "none of the 2 images" in capsys.readouterr().err and not out.exists()
