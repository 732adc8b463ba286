"""siglip2_embed.py with a tiny tower of random weights."""

import json
import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import siglip2_embed
import timm
import torch
from PIL import ExifTags, Image
from safetensors import safe_open
from safetensors.torch import save, save_file
from timm.models import is_model, register_model
from timm.models.naflexvit import NaFlexVitCfg, _create_naflexvit

from tests.support import tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast.commands.measure.images import eval_transform, image_sources, naflex_batches
from timm_naflex_fast.commands.measure.models import load_model

NAME = "naflexvit_test_siglip"
PHOTOS = ["a.jpg", "b.png", "d.webp", "more/c.jpg"]


def naflexvit_test_siglip(pretrained=False, **kwargs):
    """A tower of 32 channels with the attention pooling and the bilinear 16x16 table of
    SigLIP-2."""
    table = dict(global_pool="map", pos_embed_interp_mode="bilinear")
    cfg = NaFlexVitCfg(patch_size=16, embed_dim=32, depth=2, num_heads=2, **table)
    return _create_naflexvit(NAME, pretrained=pretrained, cfg=cfg, **{"num_classes": 0, **kwargs})


if not is_model(NAME):  # timm's factory makes it
    register_model(naflexvit_test_siglip)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "out.safetensors"


@pytest.fixture
def embed(photos, out, tmp_path):
    """The script, which embeds the photos with weights of a file."""
    torch.manual_seed(1)
    model = timm.create_model(NAME)
    torch.nn.init.normal_(model.embeds.pos_embed)
    save_file(model.state_dict(), tmp_path / "tiny.safetensors")
    options = f"--model {NAME} --max-seq-len 36 --batch-size 2 --device cpu".split()
    options += ["--checkpoint", tmp_path / "tiny.safetensors", "--out", out]

    def run(*more):
        return siglip2_embed.main([str(word) for word in (photos, *options, *more)])

    return run


def read(out):
    with safe_open(out, "pt") as opened:
        metadata = {key: json.loads(value) for key, value in opened.metadata().items()}
        return metadata["paths"], opened.get_tensor("embeddings"), metadata


def pooled_by_timm(photos, dtype):
    """Unpatched timm, one image at a time, in the order of the paths."""
    model = load_model(NAME, photos.with_name("tiny.safetensors"))[0].to(dtype)
    folder = naflex_batches(image_sources(photos), eval_transform(model, 36, "bilinear"), 36, 1, [])
    with torch.inference_mode():
        return torch.cat(
            [model(batch | {"patches": batch["patches"].to(dtype)}) for batch, _ in folder]
        )


@ran("matmul")
@pytest.mark.parametrize(
    ("workers", "dtype", "atol"), [(0, "bfloat16", 0.02), (1, "float32", 1e-5)]
)
def test_embeddings_are_timms(embed, photos, out, capsys, workers, dtype, atol):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # lies on its left side
    Image.open(photos / "a.jpg").save(photos / "a.jpg", exif=exif)
    assert embed("--workers", workers, "--dtype", dtype) == 0
    assert "4 embeddings, 0 images skipped" in capsys.readouterr().out
    assert os.listdir(out.parent) == [out.name]

    paths, embeddings, metadata = read(out)
    assert paths == PHOTOS
    assert metadata["skipped"] == {} and metadata["settings"]["model"] == NAME
    want = pooled_by_timm(photos, getattr(torch, dtype))
    torch.testing.assert_close(embeddings, want, atol=atol, rtol=atol)


@pytest.fixture
def siglip2(tmp_path):
    """A small Siglip2 tower of transformers, its processor, and the folder of both."""
    transformers = pytest.importorskip("transformers", minversion="5.21")
    model = tiny_siglip2.tower()
    processor = transformers.Siglip2ImageProcessor(max_num_patches=36)
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    return model, processor, tmp_path / "model"


@ran("matmul")
def test_transformers_model_with_and_without_its_processor(siglip2, photos, out, capsys):
    model, processor, folder = siglip2
    words = f"{photos} --library transformers --model {folder} --max-seq-len 36 --device cpu --out"
    assert siglip2_embed.main([*words.split(), str(out)]) == 0
    paths, embeddings, _ = read(out)
    assert paths == PHOTOS
    for path, found in zip(paths, embeddings):
        image = Image.open(photos / path).convert("RGB")
        with torch.inference_mode():
            want = model(**processor(image, return_tensors="pt")).pooler_output[0]
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)

    (folder / "preprocessor_config.json").unlink()
    again = out.with_name("again.safetensors")
    assert siglip2_embed.main([*words.split(), str(again)]) == 0
    assert torch.equal(read(again)[1], embeddings)
    assert "has no preprocessor_config.json" in capsys.readouterr().out


@ran("matmul")
def test_stopped_in_the_middle_and_continued(embed, photos, out, capsys, monkeypatch):
    does = [DEFAULT, KeyboardInterrupt, DEFAULT]
    batch = Mock(wraps=siglip2_embed.embed, side_effect=does)
    monkeypatch.setattr(siglip2_embed, "embed", batch)
    assert embed() == 130  # as a shell reports Ctrl-C
    parts = Path(f"{out}.parts")
    assert [len(read(part)[0]) for part in parts.glob("*")] == [2]

    (parts / "00000001.safetensors.unfinished").write_bytes(b"half")  # as if killed while writing
    assert embed("--save-every", 0) == 0
    assert "2 images to embed, 2 done before" in capsys.readouterr().out
    assert os.listdir(out.parent) == [out.name]
    paths, embeddings, _ = read(out)
    assert paths == PHOTOS
    want = pooled_by_timm(photos, torch.float32)
    torch.testing.assert_close(embeddings, want, atol=1e-5, rtol=1e-5)


@ran("matmul")
def test_finished_file_takes_in_new_images_and_loses_none(embed, photos, out, tmp_path):
    (photos / "d.webp").rename(tmp_path / "d.webp")
    assert embed() == 0
    first_paths, first, _ = read(out)
    (tmp_path / "d.webp").rename(photos / "0.webp")
    (photos / "a.jpg").unlink()
    assert embed() == 0
    paths, embeddings, _ = read(out)
    assert paths == ["0.webp", *first_paths]
    assert torch.equal(embeddings[1:], first)


def test_a_file_of_something_else_is_refused_and_stays(embed, out, capsys):
    out.parent.mkdir()
    content = save({"x": torch.zeros(1)})
    out.write_bytes(content)
    assert embed() == 2
    assert out.read_bytes() == content
    assert "was not written by siglip2_embed.py" in capsys.readouterr().err


@ran("matmul")
def test_embeddings_of_other_settings_are_refused(embed, out, tmp_path, capsys):
    assert embed() == 0
    save_file(timm.create_model(NAME).state_dict(), tmp_path / "other.safetensors")
    before = out.read_bytes()
    capsys.readouterr()

    changes = [
        (["--checkpoint", tmp_path / "other.safetensors"], "weights_sha256"),
        (["--dtype", "bfloat16"], "dtype float32 there, bfloat16 now"),
    ]
    for options, says in changes:
        assert embed(*options) == 2
        err = capsys.readouterr().err
        assert says in err and "choose another --out" in err and err.count("\n") == 1
    assert out.read_bytes() == before


@ran("matmul")
def test_unreadable_images_are_listed_and_skipped(embed, photos, out, capsys):
    (photos / "broken.png").write_text("no image")
    (photos / "cut.jpg").write_bytes((photos / "a.jpg").read_bytes()[:400])
    (photos / "dead.png").symlink_to("nowhere")
    assert embed("--batch-size", 1) == 0
    paths, _, metadata = read(out)
    assert paths == PHOTOS
    assert set(metadata["skipped"]) == {"broken.png", "cut.jpg", "dead.png"}
    err = capsys.readouterr().err
    assert "not readable as an image: broken.png" in err
    assert "not readable as an image: dead.png: [Errno 2] No such file" in err

    for name in PHOTOS:
        (photos / name).write_text("no image")
    out.unlink()
    assert embed() == 2
    assert "none of the 7 images" in capsys.readouterr().err and not out.exists()


def test_a_tower_that_pools_nothing_has_no_embedding_of_an_image(photos, out, tmp_path, capsys):
    pytest.importorskip("transformers")
    tower = tiny_siglip2.tower(vision_use_head=False)
    tower.save_pretrained(tmp_path / "headless")
    timms = ["--model", tiny_siglip2.FAMILY, "--checkpoint", tmp_path / "headless"]
    theirs = ["--library", "transformers", "--model", tmp_path / "headless"]
    for options in (timms, theirs):
        words = [str(word) for word in (photos, *options, "--device", "cpu", "--out", out)]
        assert siglip2_embed.main(words) == 2
        assert "no head that pools" in capsys.readouterr().err
    assert not out.exists()
