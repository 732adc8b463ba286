"""Who agrees with big_vision's recording of SigLIP-2's tower, from its own pixels."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_recordings
from tests.support.running import ran, running
from timm_naflex_fast.commands.measure.bench.workloads import coordinates
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.export import Naflex, make_inputs, write
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import (
    build_processor,
    build_tower,
    stages_of,
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


def padded(pipeline, recording):
    inputs = inputs_of(recording.stages, recording.about["max_patches"])
    return stages_of(inputs, pipeline.tower(inputs))


def one_by_one(pipeline, recording):
    found = []
    for stages in recording.stages:
        inputs = inputs_of([stages], len(stages["pixels"]))
        found += stages_of(inputs, pipeline.tower(inputs))
    return found


def compared(recording, ports):
    for port in ports:
        del port["pixels"]  # they are the recording's own
    return tiny_recordings.compared(recording, ports)


@pytest.mark.parametrize("how", [padded, one_by_one])
@pytest.mark.parametrize("mode", [BASELINE, "matmul", "interpolate_cached"])
def test_timms_own_loop_and_each_exact_mode_agree(mode, how, model, recording):
    expected = set() if mode == BASELINE else {mode}
    with ran(*expected):
        ports = how(timm_pipeline(model, 64, contender=mode), recording)
    found = compared(recording, ports)
    assert found.first is None
    assert found.not_written == ["pixels"]


@pytest.mark.parametrize("how", [padded, one_by_one])
def test_grid_sample_parts_exactly_at_the_position_embedding(how, model, recording):
    with ran("grid_sample"):
        ports = how(timm_pipeline(model, 64, contender="grid_sample"), recording)
    found = compared(recording, ports)
    assert found.first.stage == "position_embedding"
    assert found.reason.known and "no antialiasing" in found.reason.words


@pytest.mark.parametrize("how", [padded, one_by_one])
def test_transformers_agrees(how, model, recording):
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    tower = build_tower(model, {"num_attention_heads": recording.about["heads"]})
    pipeline = transformers_pipeline(tower, build_processor(model, 64))
    found = compared(recording, how(pipeline, recording))
    assert found.first is None


# What follows gives the pooled output alone: compilers and runtimes keep no stage inside.


def batch_of(recording):
    inputs = inputs_of(recording.stages, recording.about["max_patches"])
    coord = coordinates(inputs.grid.tolist(), inputs.pixels.shape[1])
    return {"patches": inputs.pixels, "patch_coord": coord, "patch_valid": inputs.valid}


def arrays_of(recording):
    return {name: tensor.numpy() for name, tensor in batch_of(recording).items()}


def assert_pooled_agrees(recording, pooled):
    assert len(pooled) == len(recording.stages)
    found = tiny_recordings.compared(recording, [{"pooled": one} for one in pooled])
    assert found.first is None


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_the_compiled_model_agrees(mode, model, recording):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with running(mode), torch.no_grad():
        pooled = compiled(batch_of(recording)).numpy()
    assert_pooled_agrees(recording, pooled)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The kit's model as an ONNX file."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    file = tmp_path_factory.mktemp("exported") / "kit.onnx"
    module = Naflex(model).eval()
    (example, *_), free = make_inputs(model, None)
    with torch.no_grad(), running("matmul", model=module):
        write(module, example, free, file)
    return file


def test_the_exported_model_agrees_in_onnx_runtime(exported, recording):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (pooled,) = session.run(None, arrays_of(recording))
    assert_pooled_agrees(recording, pooled)


@pytest.mark.slow
def test_the_exported_model_agrees_in_openvino_at_float32(exported, recording):
    openvino = pytest.importorskip("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(exported), "CPU", settings)
    assert_pooled_agrees(recording, compiled(arrays_of(recording))[0])
