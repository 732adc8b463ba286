"""Local weights: what trainers save is found, and nothing but tensors is read."""

import argparse
import os
import re
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save, save_file

from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure import models
from timm_naflex_fast.measure.models import load_model, read_checkpoint

NAME, ROPE = "vit_tiny_patch16_224", "naflexvit_base_patch16_gap"
HUB, SMALL = "naflexvit_base_patch16_siglip.v2_webli", dict(depth=1, embed_dim=24, num_heads=2)
KWARGS = [f"{key}={value}" for key, value in SMALL.items()]
UNUSABLE = [{"head.weight": torch.tensor(1.0)}, {7: torch.ones(2)}, {"state_dict": 3}, {}, []]
WHOLE = save({"embeds.pos_embed": torch.ones(100, 100)})
CHANGES = {
    "timm_model.": lambda state: {
        f"timm_model.{k}": v for k, v in state.items()
    },  # as transformers' TimmWrapper
    "encoder.": lambda state: {f"encoder.{k}": v for k, v in state.items()},
    "half": lambda state: dict(list(state.items())[::2]),
    "deeper": lambda state: (
        state | {k.replace("blocks.0", "blocks.1"): v.clone() for k, v in state.items()}
    ),
    "shallower": lambda state: {k: v for k, v in state.items() if "blocks" not in k},
    "one more": lambda state: state | {"teacher": torch.ones(2)},
}


def trained(**more):
    torch.manual_seed(1)
    model = timm.create_model(NAME, use_naflex=True, **SMALL, **more)
    torch.nn.init.normal_(model.embeds.pos_embed)
    return model


@pytest.mark.parametrize("classes", [7, 1000, 0])
@pytest.mark.parametrize("key", ["state_dict_ema", "state_dict", "model", None])
def test_a_fine_tuned_checkpoint_has_its_own_head(key, classes, tmp_path):
    model, file = trained(num_classes=classes), tmp_path / "last.pth.tar"
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    beside = {
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, model_kwargs={}),
        "optimizer": {"state": {}},
    }
    beside |= (
        {} if key == "model" else {"state_dict": {name: value + 1 for name, value in state.items()}}
    )
    torch.save({**beside, key: state} if key else state, file)
    loaded, words = load_model(NAME, file, **SMALL)
    assert words == "file last.pth.tar" + f" ({key})" * bool(key) and loaded.num_classes == classes
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    assert "state_dict" not in loaded.pretrained_cfg


@pytest.mark.parametrize(
    "classes", [5, 3]
)  # as in the file, or with a new head, where timm itself is not strict
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_that_is_not_loaded_whole_is_an_error_with_numbers_and_names(
    change, classes, suffix, tmp_path
):
    own, file = trained(num_classes=5).state_dict(), tmp_path / f"last{suffix}"
    state = CHANGES[change](own)
    save_file(state, file) if suffix == ".safetensors" else torch.save({"model": state}, file)
    with pytest.raises(RuntimeError, match="state dict of timm's model itself") as error:
        load_model(NAME, file, num_classes=classes, **SMALL)
    head = {"head.weight", "head.bias"} if classes != 5 or change[-1] == "." else set()
    missing, unused = own.keys() - state - head, state.keys() - own
    for names, what in ((missing, f"of the model's {len(own)} parameters"), (unused, "tensors")):
        found = re.search(rf"(\d+) {what} [\w ]*\(([\w., ]+)\)", str(error.value))
        assert (int(found[1]) if found else 0) == len(names) and (
            not names or {*found[2].split(", ")} <= names
        )


def test_what_timm_converts_counts_as_used_and_a_new_head_is_said(tmp_path):
    classic = timm.create_model(NAME, **SMALL)  # a 3-D table, a kernel of a convolution
    torch.save(classic.state_dict(), tmp_path / "classic.pth")
    model, words = load_model(NAME, tmp_path / "classic.pth", num_classes=3, **SMALL)
    assert torch.equal(model.embeds.pos_embed.flatten(1, 2), classic.pos_embed[:, -196:])
    assert model.num_classes == 3 and words == "file classic.pth; an untrained head of 3 classes"
    _, words = load_model(NAME, tmp_path / "classic.pth", num_classes=0, **SMALL)
    assert words == "file classic.pth"


@pytest.mark.parametrize("kept", [True, False])
def test_buffers_that_a_file_lacks_or_has_are_timms_own(kept, tmp_path):
    model = timm.create_model(ROPE, **SMALL, rope_type="axial")
    buffers = dict(model.named_buffers())
    save_file(
        model.state_dict() | buffers if kept else dict(model.named_parameters()),
        tmp_path / "last.safetensors",
    )
    assert buffers
    load_model(ROPE, tmp_path / "last.safetensors", **SMALL, rope_type="axial")


@ran("matmul")
@pytest.mark.parametrize("suffix", [".pth.tar", ".safetensors"])
def test_drift_and_bench_take_it(suffix, photos, tmp_path, capsys):
    file = tmp_path / f"last{suffix}"
    state = trained(num_classes=3, pos_embed_grid_size=(6, 6)).state_dict()
    save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    given = ["--model", NAME, "--checkpoint", str(file), "--model-kwargs", *KWARGS]
    assert cli.main(["drift", *given, "--images", str(photos)]) == 2
    err = capsys.readouterr().err
    assert "size mismatch for embeds.pos_embed" in err and "--model-kwargs takes" in err
    assert "--checkpoint FILE" not in err
    given.append("pos_embed_grid_size=(6, 6)")
    assert cli.main(["drift", *given, "--images", str(photos), "--contenders", "matmul"]) == 0
    assert "same class" in capsys.readouterr().out
    assert (
        cli.main(["bench", *given, "--batch-size", "2", "--max-seq-len", "16", "--rounds", "1"])
        == 0
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_numbers_of_numpy_beside_the_weights(zipped, tmp_path):
    state = trained().state_dict()
    beside = {"metric": np.float64(3.0), "epoch": np.int64(3), "best": [np.float32(1)]}
    torch.save(
        {"model": state, **beside}, tmp_path / "last.pth", _use_new_zipfile_serialization=zipped
    )
    assert torch.equal(
        read_checkpoint(tmp_path / "last.pth")[0]["norm.weight"], state["norm.weight"]
    )


@pytest.mark.parametrize(
    "record", [*UNUSABLE, b"", b"no weights", b"\x80\x02no", WHOLE[: len(WHOLE) // 2]]
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_file_without_usable_weights_says_in_a_line_what_to_save(record, suffix, tmp_path):
    file = tmp_path / f"last.{suffix}"
    file.write_bytes(record) if isinstance(record, bytes) else torch.save(record, file)
    with pytest.raises(
        RuntimeError, match=r"last\S* cannot be loaded .*; save a file of tensors: .safe"
    ) as error:
        load_model(NAME, file, **SMALL)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, "a model is needed: --model NAME"),
        ("", "a model is needed: --model NAME"),
        ("naflexvit_x", "timm has no NaFlexVit 'naflexvit_x'.*; valid: .*naflexvit_base_patch16"),
        ("resnet18", "timm has no NaFlexVit 'resnet18'; valid: "),
        ("vit_tiny_patch16_223", r"223'; did you mean vit_tiny_patch16_224\?; valid: "),
        ("vit_tiny_r_s16_p8_224", "timm has no NaFlexVit 'vit_tiny_r_s16_p8_224'"),
        ("vit_relpos_small_patch16_224", "timm has no NaFlexVit 'vit_relpos_small"),
        (f"{NAME}.nope", f"timm has no weights '{NAME}.nope'; valid: .*{NAME}.augreg_in21k"),
        (f"{ROPE}.nope", f"timm has no weights '{ROPE}.nope'; valid: "),
    ],
)
@pytest.mark.parametrize("random_weights", [True, False])
def test_a_name_that_timm_does_not_know_is_told_before_a_model_is_made(
    name, says, random_weights, monkeypatch
):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match=says):
        load_model(name, random_weights=random_weights)


def test_options_that_the_model_does_not_take():
    with pytest.raises(RuntimeError, match="--model-kwargs takes"):
        load_model(NAME, random_weights=True, depth=-1)


def test_weights_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=OSError("no route to the hub")))
    with pytest.raises(RuntimeError, match=r"no route to the hub.*--checkpoint FILE"):
        load_model(HUB)


def test_random_weights_are_seeded_and_cast():
    (one, words), (other, _) = (
        load_model(NAME, random_weights=True, dtype="float16", **SMALL) for _ in range(2)
    )
    assert (
        words.startswith("random, untrained, seed 0")
        and one.embeds.pos_embed.dtype == torch.float16
    )
    assert all(map(torch.equal, one.parameters(), other.parameters()))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


@pytest.mark.parametrize(("place", "zipped"), [("args", True), (None, False)])
def test_no_code_in_a_file_runs_whatever_timm_does(place, zipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = lambda file, *_, **__: torch.load(file, weights_only=False)  # as timm 1.0.25
    monkeypatch.setattr(timm.models._helpers, "load_state_dict", old)
    record = {"state_dict": trained().state_dict(), place: Evil()} if place else Evil()
    torch.save(record, "evil.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        RuntimeError, match=r"evil.pth cannot be loaded \(UnpicklingError: Weights only load failed"
    ):
        load_model(NAME, "evil.pth", **SMALL)
    assert not (tmp_path / "PWNED").exists()


def test_settings_are_read_as_timms_scripts_read_them():
    parser = argparse.ArgumentParser(exit_on_error=False)
    models.add_model_arguments(parser)
    given = parser.parse_args(
        ["--model-kwargs", "a=1", "b=bilinear", "c=(2, 3)", "d=None"]
    ).model_kwargs
    assert dict(given) == {"a": 1, "b": "bilinear", "c": (2, 3), "d": None}
    for wrong in ("--model-kwargs a", "--checkpoint x --random-weights"):
        with pytest.raises(argparse.ArgumentError):
            parser.parse_args(wrong.split(" "))
    for key in ("name", "checkpoint", "model_name", "pretrained"):  # the command's own
        with pytest.raises(RuntimeError, match=f"cannot be loaded .TypeError: .*{key}"):
            load_model(NAME, random_weights=True, **{key: "x"})
