"""Who agrees with big_vision's recording of SigLIP-2's tower, from its own pixels."""

from pathlib import Path

import pytest
from vit_ports.compare import compare_recordings
from vit_ports.format import read_recording

from tests.support.running import ran
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import timm_source, transformers_source

KIT = Path(__file__).resolve().parents[3] / "ports" / "kit"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"
TRAINED = dict(pos_embed_interp_mode="bilinear")  # timm before 1.0.30 has another default


@pytest.fixture(scope="module")
def recording():
    return read_recording(KIT)


@pytest.fixture(scope="module")
def model(recording):
    weights = KIT / "weights" / "transformers.safetensors"
    return load_model(MODEL, weights, num_heads=recording.about["heads"], **TRAINED)[0]


def compared(source, recording):
    """The comparison of what the source's tower makes of the recording's pixels."""
    ports = source.tower(recording.stages)
    for port in ports:
        del port["pixels"]  # they are the recording's own
    return compare_recordings(recording, ports)


@pytest.mark.parametrize("mode", [BASELINE, "matmul", "interpolate_cached", "grid_sample"])
def test_timms_own_loop_and_each_exact_mode_agree(mode, model, recording):
    expected = {mode} - {BASELINE}
    with ran(*expected):
        found = compared(timm_source(model, 64, contender=mode), recording)
    assert found.not_written == ["pixels"]
    if mode != "grid_sample":
        assert found.first is None
        return
    assert found.first.stage == "position_embedding"
    assert found.reason.known and "no antialiasing" in found.reason.words


def test_transformers_agrees(model, recording):
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    found = compared(transformers_source(model, 64, KIT / "weights"), recording)
    assert found.first is None
