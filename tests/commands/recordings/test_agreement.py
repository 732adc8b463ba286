"""Who agrees with big_vision's recording of SigLIP-2's tower, from its own pixels."""

from pathlib import Path

import pytest

from tests.support import tiny_recordings
from tests.support.running import ran
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import (
    build_processor,
    build_tower,
    timm_pipeline,
    transformers_pipeline,
)
from timm_naflex_fast.commands.measure.record import inputs_of
from timm_naflex_fast.commands.recordings.format import read_recording

KIT = Path(__file__).resolve().parents[3] / "recordings" / "siglip2_naflex_tiny"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"
TRAINED = dict(pos_embed_interp_mode="bilinear")  # timm before 1.0.30 has another default


@pytest.fixture(scope="module")
def recording():
    return read_recording(KIT)


@pytest.fixture(scope="module")
def model(recording):
    weights = KIT / "weights" / "big_vision.npz"
    return load_model(MODEL, weights, num_heads=recording.about["heads"], **TRAINED)[0]


def compared(pipeline, recording):
    """The comparison of what the pipeline's tower makes of the recording's pixels."""
    inputs = inputs_of(recording.stages, recording.about["max_patches"])
    ports = pipeline.tower(inputs)
    for port in ports:
        del port["pixels"]  # they are the recording's own
    return tiny_recordings.compared(recording, ports)


@pytest.mark.parametrize("mode", [BASELINE, "matmul", "interpolate_cached"])
def test_timms_own_loop_and_each_exact_mode_agree(mode, model, recording):
    expected = set() if mode == BASELINE else {mode}
    with ran(*expected):
        found = compared(timm_pipeline(model, 64, contender=mode), recording)
    assert found.first is None
    assert found.not_written == ["pixels"]


def test_grid_sample_parts_exactly_at_the_position_embedding(model, recording):
    with ran("grid_sample"):
        found = compared(timm_pipeline(model, 64, contender="grid_sample"), recording)
    assert found.first.stage == "position_embedding"
    assert found.reason.known and "no antialiasing" in found.reason.words


def test_transformers_agrees(model, recording):
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    tower = build_tower(model, {"num_attention_heads": recording.about["heads"]})
    processor, _ = build_processor(model, 64)
    found = compared(transformers_pipeline(tower, processor), recording)
    assert found.first is None
