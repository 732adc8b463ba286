"""What the pipelines of timm and of transformers give, from big_vision's own pixels and from
pictures."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import (
    of_8_bits,
    siglip2_weights,
    timm_source,
    transformers_source,
)
from timm_naflex_fast.commands.measure.record import make_recording
from timm_naflex_fast.names import BASELINE
from vit_ports.compare import compare_recordings
from vit_ports.format import read_recording
from vit_ports.mistakes import mistakes_of, with_mistakes
from vit_ports.towers.siglip2 import SIGLIP2

KIT = Path(__file__).resolve().parents[3] / "ports" / "kit"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"
SIZES = dict(embed_dim=32, depth=2, num_heads=4, patch_size=8, pos_embed_grid_size=(12, 12))
TRAINED = dict(pos_embed_interp_mode="bilinear")  # timm before 1.0.30 has another default
LENGTH = 64  # patches of the kit


@pytest.fixture(scope="module")
def recording():
    return read_recording(KIT)


@pytest.fixture
def model():
    """timm's tower with the kit's weights; a test may spoil it."""
    weights = KIT / "weights" / "transformers.safetensors"
    return load_model(MODEL, weights, **SIZES, **TRAINED)[0]


# From the kit's pixels.


def compared(source, recording, precision="float32"):
    """The comparison of what the source's tower makes of the recording's pixels."""
    ports = source.tower(recording.stages, precision.replace("tf32", "float16"))
    for port in ports:
        del port["pixels"]  # they are the recording's own
    return compare_recordings(recording, ports, precision)


@pytest.mark.parametrize("mode", [BASELINE, "matmul", "interpolate_cached", "grid_sample"])
def test_timms_own_loop_and_each_exact_mode_agree(mode, model, recording):
    expected = {mode} - {BASELINE}
    with ran(*expected):
        found = compared(timm_source(model, LENGTH, mode=mode), recording)
    assert found.not_written == ["pixels"]
    if mode != "grid_sample":
        assert found.first is None
        return
    assert found.first.stage == "position_embedding"
    assert found.reason.known and "no antialiasing" in found.reason.words


@pytest.mark.parametrize("precision", ["tf32", "float16", "bfloat16"])
def test_timm_is_equal_in_each_precision(precision, model, recording):
    found = compared(timm_source(model, LENGTH), recording, precision)
    assert found.first is None and found.reason is None


def test_weights_of_8_bits_have_a_scale_for_a_block_a_row_or_all():
    weight = torch.zeros(2, 64)
    weight[0, 0], weight[0, 40], weight[1, 5] = 127.0, 12.7, 1270.0
    weight[:, 63] = 0.3
    errors = {}
    for how in ("int8_by_block", "int8_by_row", "int8_by_tensor"):
        errors[how] = (of_8_bits(weight, how) - weight).abs()[:, 63]
    # A step of 0.1, of 1 and of 10, and none of them rounds to nothing where it need not.
    assert errors["int8_by_block"][0] < 1e-6 and errors["int8_by_block"][1] < 1e-6
    torch.testing.assert_close(errors["int8_by_row"], torch.tensor([0.3, 0.3]))
    assert of_8_bits(weight, "int8_by_tensor")[0, 40] == 10
    vector = torch.tensor([0.123, 4.0])
    assert of_8_bits(vector, "int8_by_tensor") is vector


@pytest.fixture
def transformers():
    pytest.importorskip("torchvision")
    return pytest.importorskip("transformers")


def test_transformers_agrees(model, recording, transformers):
    found = compared(transformers_source(model, LENGTH, KIT / "weights"), recording)
    assert found.first is None


def test_transformers_own_code_runs_whatever_is_enabled(model, recording, transformers):
    source = transformers_source(model, LENGTH, KIT / "weights")
    (expected,) = source.tower(recording.stages[:1])
    with enable(library="transformers"):
        (found,) = source.tower(recording.stages[:1])
    assert np.array_equal(found["position_embedding"], expected["position_embedding"])


# Settings beside the weights.


@pytest.fixture
def processor(transformers, tmp_path):
    """Writes a processor's file with other settings, beside the kit's of the tower; returns the folder."""
    shutil.copy(KIT / "weights" / "config.json", tmp_path)

    def processor(**settings):
        given = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=LENGTH).to_dict()
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given | settings))
        return tmp_path

    return processor


NORMALIZED_OTHERWISE = {
    "ImageNet": dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
    "not normalized": dict(do_normalize=False),
    "rescaled by 256": dict(rescale_factor=1 / 256),
    "mean of 127": dict(image_mean=[127 / 255] * 3),
}
PICTURES = tiny_siglip2.smooth_pictures([(200, 200), (300, 180), (64, 640), (151, 233)])
TRIED = ("mean_and_std_half", "bicubic", "nearest")


@pytest.mark.parametrize("name", NORMALIZED_OTHERWISE)
def test_another_normalization_is_named_and_so_is_a_filter_beside_it(name, model, processor):
    settings = NORMALIZED_OTHERWISE[name]
    source = transformers_source(model, LENGTH, processor(**settings))
    reference = make_recording(source, PICTURES, [""] * 4, {})
    tried = [one for one in mistakes_of(SIGLIP2, 2) if one.name in TRIED]
    reference = with_mistakes(SIGLIP2, reference, siglip2_weights(model), PICTURES, tried)
    found = compare_recordings(reference, timm_source(model, LENGTH, "bilinear").read(PICTURES))
    assert found.first.stage == "pixels"
    assert found.reason.words == "mean and standard deviation are 0.5: pixels from -1 to 1"

    # Mistakes of the resize are made with the processor's own numbers.
    other = transformers_source(model, LENGTH, processor(resample=3, **settings))
    reason = compare_recordings(reference, other.read(PICTURES)).reason
    assert reason.words == "pictures resized by bicubic"


def test_settings_beside_the_weights_are_followed(model, processor):
    folder = processor(resample=0, max_num_patches=9)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("gelu_pytorch_tanh", "relu"))
    source = transformers_source(model, None, folder)
    assert (source.max_patches, source.filter) == (9, "nearest")
    assert source.network.config.hidden_act == "relu"
    config.unlink()
    with pytest.raises(RuntimeError, match="must lie there"):
        transformers_source(model, None, folder)
