"""Local weights: what trainers save is found, and nothing but tensors is read."""

import argparse
import io
import os
from unittest.mock import Mock

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save, save_file

from timm_naflex_fast.commands.measure.models import load_model, setting

NAME = "vit_tiny_patch16_224"
HUB = "naflexvit_base_patch16_siglip.v2_webli"
SMALL = dict(depth=1, embed_dim=24, num_heads=2)


def pickled(record):
    file = io.BytesIO()
    torch.save(record, file)
    return file.getvalue()


# Files that hold no weights, by their names.
NO_WEIGHTS = {
    "last.pth": [
        b"",
        b"no weights",
        *map(pickled, (torch.ones(1), {7: torch.ones(2)})),
    ],
    "last.safetensors": [b"", save({}), save({"embeds.pos_embed": torch.ones(100, 100)})[:20_000]],
    "pytorch_model.bin": [b"GGUF\x03\0\0\0", b"version https://git-lfs.github.com/spec/v1"],
    "last.npz": [b"PK\3\4cut"],
    "model.safetensors.index.json": [b"{", b"[]", b"{}"],
}


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


def one_more(state):
    return state | {"teacher": torch.ones(2)}


def of_another_library(state):
    return {name.replace("blocks.0.norm", "layers.0.norm"): state[name] for name in state}


# And what is said of it.
CHANGES = {
    one_more: r'NaFlexVit: Unexpected key\(s\) in state_dict: "teacher"\.',
    of_another_library: r'Missing key\(s\) in state_dict: "blocks.0.norm1.weight", ("[^"]+", ){2}\.\.\.\. ',
}


def trained(**more):
    torch.manual_seed(1)
    model = timm.create_model(NAME, use_naflex=True, **SMALL | more)
    torch.nn.init.normal_(model.embeds.pos_embed)
    return model


# As timm's trainer, transformers' TimmWrapper, and Lightning and others write them.
@pytest.mark.parametrize(
    ("key", "prefix", "classes"),
    [
        ("state_dict_ema", "module.", 7),
        ("model", "module.", 0),
        ("state_dict", "timm_model.", 5),
        ("state_dict", "visual.trunk.", 5),
    ],
)
def test_a_fine_tuned_checkpoint_has_its_own_head(key, prefix, classes, tmp_path):
    model = trained(num_classes=classes)
    record = {"args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}
    # Averages come before the weights of the last step.
    if key != "model":
        record["state_dict"] = trained(num_classes=classes + 1).state_dict()
    record[key] = prefixed(model.state_dict(), prefix)
    torch.save(record, tmp_path / "last.pth.tar")

    loaded, words = load_model(NAME, tmp_path / "last.pth.tar", **SMALL)
    assert words == "file last.pth.tar"
    assert loaded.num_classes == classes
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_loaded_whole_is_an_error_with_numbers_and_names(change, tmp_path):
    file = tmp_path / "last.safetensors"
    save_file(change(trained(num_classes=5).state_dict()), file)
    with pytest.raises(
        RuntimeError, match=f"{CHANGES[change]}.*--checkpoint FILE takes timm's own weights"
    ):
        load_model(NAME, file, **SMALL)


def test_what_timm_converts_counts_as_used(tmp_path):
    classic = timm.create_model(NAME, **SMALL)  # a 3-D table, a kernel of a convolution
    file = tmp_path / "classic.pth"
    torch.save(classic.state_dict(), file)

    model, _ = load_model(NAME, file, **SMALL)
    assert torch.equal(model.embeds.pos_embed.flatten(1, 2), classic.pos_embed[:, -196:])


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_file_without_weights_says_in_a_line_what_was_found_and_what_is_taken(name, tmp_path):
    file = tmp_path / name
    says = rf"{name} cannot be loaded \(.*\); --checkpoint FILE takes"
    for content in NO_WEIGHTS[name]:
        file.write_bytes(content)
        with pytest.raises(RuntimeError, match=says) as error:
            load_model(NAME, file, **SMALL)
        assert "\n" not in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet18", r"timm has no NaFlexVit 'resnet18'; valid: naflexvit_\* and vit_\*"),
        ("vit_tiny_patch16_223", r"223'; .*; did you mean vit_tiny_patch16_224\?"),
    ],
)
def test_a_name_that_timm_does_not_know_is_told_before_a_model_is_made(name, says, monkeypatch):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match=says):
        load_model(name)


@pytest.mark.parametrize("options", [{"depth": -1}, {"name": "x"}])
def test_options_that_the_model_does_not_take(options):
    with pytest.raises(RuntimeError, match="--model-kwargs takes"):
        load_model(NAME, random_weights=True, **options)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    ask = Mock(side_effect=OSError("no route to the hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError))
    with pytest.raises(RuntimeError, match=r"no route to the hub.*--checkpoint FILE"):
        load_model(HUB)
    ask.assert_called_once()


def test_random_weights_are_seeded():
    one, words = load_model(NAME, random_weights=True, **SMALL)
    other, _ = load_model(NAME, random_weights=True, **SMALL)
    assert words.startswith("random, untrained, seed 0")
    assert all(map(torch.equal, one.parameters(), other.parameters()))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def test_no_code_in_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": trained().state_dict(), "args": Evil()}, "evil.pth")
    says = r"evil.pth cannot be loaded \(it holds other things than tensors, or is damaged\)"
    with pytest.raises(RuntimeError, match=says) as error:
        load_model(NAME, "evil.pth", **SMALL)
    assert "weights_only" not in str(error.value)  # torch's advice is to let it run
    assert not (tmp_path / "PWNED").exists()


def test_settings_are_read_as_timms_scripts_read_them():
    words = ["a=1", "b=bilinear", "c=(2, 3)", "d=None"]
    assert dict(map(setting, words)) == {"a": 1, "b": "bilinear", "c": (2, 3), "d": None}
