"""What a user names, and the file of weights that it means."""

import json

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
    for beside in ("optimizer.pt", "rng_state_0.pth", "training_args.bin", "config.json"):
        (tmp_path / beside).write_text("{}")
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
    says = "holds 2 files of weights: name one of ema.safetensors, last.safetensors"
    with pytest.raises(Unusable, match=says):
        find_weights(tmp_path)


def test_a_trainers_folder_means_its_last_checkpoint(tmp_path):
    for step in (900, 1000, 50):
        put(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "checkpoint-best").mkdir()
    assert find_weights(tmp_path) == tmp_path / "checkpoint-1000" / "model.safetensors"
    words = read_checkpoint(tmp_path).words
    assert words == "file checkpoint-1000/model.safetensors"


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
    with pytest.raises(
        FileNotFoundError, match=r"google/large is .*no model in the hub's cache .`hf down"
    ):
        find_weights("google/large")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mmproj.gguf", r"\(GGUF\); give the .safetensors"),
        ("model.onnx", "is a program of ONNX; give the .safetensors"),
        ("weights.H5", "is a file of Keras; give the .safetensors"),
        ("flax_model.msgpack", "is a file of flax; give the .safetensors"),
        ("array.npy", "is one NumPy array; give the .npz of Google's release"),
        ("config.json", "holds no weights; valid: a file of weights, an index of shards"),
    ],
)
def test_a_file_of_another_form_gets_advice_for_that_form(name, says, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(Unusable, match=f"{name} .*{says}|{name} {says}"):
        find_weights(tmp_path / name)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_index_that_names_no_shards_is_to_be_fetched_again(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"cannot be loaded \(.*\); fetch it again"):
        load_model(NAME, tmp_path)
