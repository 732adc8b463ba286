"""What a user names, and the file of weights that it means."""

import json

import pytest

from timm_naflex_fast.commands.measure.weight_files import find_weights

SHARDS = [f"model-0000{number}-of-00012.safetensors" for number in (1, 2)]
FILE = {"size": 1, "blob_id": "0"}  # as the hub's client writes it down
REVISIONS = [f"snapshots/{name}/model.safetensors" for name in ("other", "right")]
# The files of a folder, of which the last one is taken.
TAKEN = {
    "a name of its own": ["siglip2_base.safetensors"],
    "beside what a trainer writes": ["optimizer.pt", "training_args.bin", "model.fp16.safetensors"],
    "shards with their index": [*SHARDS, "model.safetensors.index.fp16.json"],
}
# Files of a folder, of which none is taken, and what is said.
REFUSED = {
    "must hold one file of weights; found: none": ["notes.txt"],
    "must hold one file of weights; found: ema.pt, last.pt": ["ema.pt", "last.pt"],
    f"must hold one file of weights; found: {', '.join(SHARDS)}": SHARDS,
}


def put(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("right")  # the revision that is called main


@pytest.mark.parametrize("case", TAKEN)
def test_the_one_file_of_weights_in_a_folder_is_taken(case, tmp_path):
    put(tmp_path, TAKEN[case])
    assert find_weights(tmp_path) == tmp_path / TAKEN[case][-1]


@pytest.mark.parametrize("says", REFUSED)
def test_of_several_none_is_chosen_and_what_was_found_is_named(says, tmp_path):
    put(tmp_path, REFUSED[says])
    with pytest.raises(ValueError, match=says):
        find_weights(tmp_path)


def test_a_name_on_the_hub_is_looked_for_in_its_cache(tmp_path, monkeypatch):
    """And there the revision that is called main."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    put(tmp_path / "models--google--tiny", ["refs/main", *REVISIONS])
    # The hub's client may have written down what else the hub has, and nobody fetched.
    listing = tmp_path / "models--google--tiny" / "trees" / "right.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"format_version": 1, "files": {"README.md": FILE}}))
    assert find_weights("google/tiny") == tmp_path / "models--google--tiny" / REVISIONS[1]
    for name in ("google/large", "no/such/file.pth"):
        with pytest.raises(ValueError, match=f"no file or folder {name}, and no such model"):
            find_weights(name)
