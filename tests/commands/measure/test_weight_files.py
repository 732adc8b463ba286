"""What a user names, and the file of weights that it means."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from timm_naflex_fast.commands.measure.checkpoints import read_checkpoint
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.weight_files import Unusable, find_weights

STATE = {"embeds.proj.weight": torch.ones(2, 3)}
NAME = "vit_tiny_patch16_224"


def put(*files):
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(STATE, file)


@pytest.mark.parametrize(
    "name", ["model.fp16.safetensors", "MODEL.SAFETENSORS", "siglip2_base.safetensors"]
)
def test_a_folders_one_file_of_weights_is_taken_whatever_its_name(name, tmp_path):
    put(tmp_path / name)
    assert find_weights(tmp_path) == tmp_path / name
    assert read_checkpoint(tmp_path).tensors.keys() == STATE.keys()


def test_what_a_trainer_writes_beside_the_weights_is_passed_over(tmp_path):
    for name in (
        "weights.pt",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "training_args.bin",
    ):
        torch.save({name: torch.ones(1)}, tmp_path / name)
    assert find_weights(tmp_path) == tmp_path / "weights.pt"


def test_a_variant_in_shards_is_found_by_its_index(tmp_path):
    index = tmp_path / "model.safetensors.index.fp16.json"
    shards = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"]
    put(*(tmp_path / shard for shard in shards))
    index.write_text(json.dumps({"weight_map": {"embeds.proj.weight": shards[0]}}))
    assert find_weights(tmp_path) == index
    assert read_checkpoint(tmp_path).tensors.keys() == STATE.keys()


def test_of_several_files_of_weights_none_is_chosen(tmp_path):
    put(tmp_path / "ema.safetensors", tmp_path / "last.safetensors")
    says = r"2 files of weights in .* \(ema.safetensors, last.safetensors\), not one; taken are"
    with pytest.raises(Unusable, match=says):
        find_weights(tmp_path)


def test_shards_need_their_index(tmp_path):
    shards = [tmp_path / f"model-0000{number}-of-00012.safetensors" for number in (1, 2)]
    put(*shards)
    for path, says in (
        (tmp_path, "2 shards without an index"),
        (shards[1], "model-00002-of-00012.safetensors, which is one of several shards"),
    ):
        with pytest.raises(Unusable, match=f"found .*{says}.*; taken are .* an index of shards"):
            find_weights(path)
    put(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    assert find_weights(tmp_path / "whole").parent.name == "whole"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, with two revisions of one model, of which "main" is the one called right."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--google--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("right")
    for revision in ("other", "right"):
        put(root / "snapshots" / revision / "model.safetensors")
    return root


def test_the_root_of_a_hubs_cache_means_the_revision_main(cache):
    assert find_weights(cache) == cache / "snapshots" / "right" / "model.safetensors"


def test_a_name_on_the_hub_is_looked_for_in_its_cache(cache):
    assert find_weights("google/tiny") == cache / "snapshots" / "right" / "model.safetensors"
    assert read_checkpoint("google/tiny").words == "file right/model.safetensors"


def test_a_name_that_the_hubs_cache_lacks_is_told_with_how_to_fetch_it(cache):
    says = "found no file or folder google/large, and no such model in the hub's cache; taken are"
    with pytest.raises(Unusable, match=says):
        find_weights("google/large")


def test_without_main_the_only_revision_is_taken(cache):
    (cache / "refs" / "main").unlink()
    with pytest.raises(Unusable, match=r"2 revisions of a model in .* \(other, right\), not one"):
        find_weights(cache)
    (cache / "snapshots" / "right" / "model.safetensors").unlink()
    (cache / "snapshots" / "right").rmdir()
    assert find_weights("google/tiny").parent.name == "other"


def test_a_file_of_something_else_is_told_by_its_first_bytes(tmp_path):
    for content, shown in (
        (b"GGUF\x03\0\0\0", r"GGUF\x03\x00\x00\x00"),
        (b"\x89HDF\r\n", r"\x89HDF\r\n"),
        (b"\x08\x09\x12", r"\x08\t\x12"),
        (b"\x93NUMPY\x01\0", r"\x93NUMPY\x01\x00"),
        (b"version https://git-lfs.github.com/spec/v1", "version https://git-lfs."),
        (b'{"model_type": "siglip2"}', '{"model_type": "siglip2"'),
        (b"", ""),
    ):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        says = f"found pytorch_model.bin, which begins with '{shown}'; taken are"
        for path in (tmp_path, tmp_path / "pytorch_model.bin"):
            with pytest.raises(Unusable, match=re.escape(says)):
                find_weights(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_index_that_names_no_shards_is_named(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"found model.safetensors.index.json, which cannot be"):
        load_model(NAME, tmp_path)
