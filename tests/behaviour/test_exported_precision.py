"""Exported programs: no float64 inside, and timm's embeddings within 2e-6 in every runtime."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH, row_major, small_vit
from timm_naflex_fast import enable
from timm_naflex_fast.measure import export

needs_export_flag = pytest.mark.skipif(
    OLD_TORCH or not hasattr(torch.compiler, "_is_exporting_flag"),
    reason="this torch does not tell an export from other tracing",
)
TABLES = {
    "16 bilinear": dict(pos_embed_grid_size=(16, 16), pos_embed_interp_mode="bilinear"),
    "32 bicubic": dict(pos_embed_grid_size=(32, 32)),
    "37 bicubic": dict(pos_embed_grid_size=(37, 37)),
    "37 bicubic, not antialiased": dict(pos_embed_grid_size=(37, 37), pos_embed_antialias=False),
    "128 as in RADIO": dict(
        pos_embed_grid_size=(128, 128),
        pos_embed_interp_mode="bilinear",
        pos_embed_antialias=False,
        pos_embed_align_corners=True,
        pos_embed_ar_preserving=True,
    ),
    "128 not antialiased": dict(
        pos_embed_grid_size=(128, 128), pos_embed_interp_mode="bilinear", pos_embed_antialias=False
    ),
    "factorized": dict(pos_embed="factorized", pos_embed_grid_size=(16, 16)),
    "128 bilinear, grid_sample": dict(
        pos_embed_grid_size=(128, 128),
        pos_embed_interp_mode="bilinear",
        pos_embed_use_grid_sample=True,
    ),
    "128 bicubic, grid_sample, align_corners": dict(
        pos_embed_grid_size=(128, 128),
        pos_embed_use_grid_sample=True,
        pos_embed_align_corners=True,
    ),
    "factorized, grid_sample": dict(
        pos_embed="factorized", pos_embed_grid_size=(37, 16), pos_embed_use_grid_sample=True
    ),
}
# Of every kind: one cell, one row, one column, the table's own size, 1,024 tokens.
BATCHES = [
    ([(1, 1)], 1),
    ([(3, 4), (2, 2), (1, 12)], 12),
    ([(24, 24), (5, 30), (30, 5), (1, 100), (100, 1), (16, 16)], 576),
    ([(32, 32), (37, 27), (1, 1024), (1024, 1), (13, 77)], 1024),
]


SLOW = [slow(name) for name in TABLES if name != "37 bicubic"]

# In a process of its own: a worker that loads and unloads many packages may crash.
ALONE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([run(**inputs) for inputs in torch.load("inputs.pt")], "outputs.pt")
"""


def inputs_of(sizes, length):
    return {
        "patches": torch.randn(len(sizes), length, 16),
        "patch_coord": row_major(sizes, length),
        "patch_valid": torch.ones(len(sizes), length, dtype=torch.bool),
    }


def exported(model, file):
    """The module of the embeddings, its program, and the ONNX file."""
    task = export.make_embeddings_task(model, size=None)
    with torch.no_grad(), enable(strict=True):
        program = export.write(task.module, task.example, task.free, file)
    return task.module, program


@needs_export_flag
@pytest.mark.parametrize("size", [None, slow((12, 44))])
@pytest.mark.parametrize("name", ["37 bicubic", *SLOW])
def test_no_tensor_is_float64(name, size, tmp_path):
    onnx = pytest.importorskip("onnx")
    model = small_vit(depth=1, **TABLES[name]).eval()
    task = export.make_task(model, size)
    file = tmp_path / "model.onnx"

    with torch.no_grad(), enable(strict=True):
        program = export.write(task.module, task.example, task.free, file)

    assert "float32" in export.dtypes_of(program)
    assert "float64" not in export.dtypes_of(program)
    graph = onnx.shape_inference.infer_shapes(onnx.load(file)).graph
    double = onnx.TensorProto.DOUBLE
    values = [*graph.value_info, *graph.input, *graph.output]
    assert len(values) > 20
    assert not [v.name for v in values if v.type.tensor_type.elem_type == double]
    assert not [tensor.name for tensor in graph.initializer if tensor.data_type == double]
    for node in graph.node:
        for attribute in node.attribute:
            assert attribute.t.data_type != double
            assert not (node.op_type == "Cast" and attribute.i == double)


@needs_export_flag
@pytest.mark.parametrize("runtime", export.LOADERS)
@pytest.mark.parametrize("name", ["37 bicubic", *SLOW])
def test_every_runtime_is_within_2e_6_of_timm(name, runtime, tmp_path):
    package = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"}.get(runtime, "torch")
    pytest.importorskip(package)
    file = Path(tmp_path, "model.onnx")
    module, program = exported(small_vit(depth=0, **TABLES[name]), file)
    run = export.LOADERS[runtime](file, program)

    for sizes, length in BATCHES:
        inputs = inputs_of(sizes, length)
        with torch.no_grad():
            want = module(**inputs)
            got = torch.as_tensor(run(inputs))
        assert want.abs().max() > 0.01
        assert (got - want).abs().max() <= 2e-6 * max(1.0, want.abs().max().item())


@needs_export_flag
@pytest.mark.slow
@pytest.mark.parametrize("name", ["37 bicubic", "128 as in RADIO"])
def test_aot_inductor_is_within_2e_6_of_timm(name, tmp_path):
    module, program = exported(small_vit(depth=0, **TABLES[name]), tmp_path / "model.pt2")
    package = str(tmp_path / "compiled.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    batches = [inputs_of(sizes, length) for sizes, length in BATCHES]
    torch.save(batches, tmp_path / "inputs.pt")

    subprocess.run([sys.executable, "-c", ALONE, package], cwd=tmp_path, check=True, timeout=300)

    for inputs, got in zip(batches, torch.load(tmp_path / "outputs.pt"), strict=True):
        with torch.no_grad():
            want = module(**inputs)
        assert (got - want).abs().max() <= 2e-6 * max(1.0, want.abs().max().item())


@needs_export_flag
def test_autocast_around_an_exported_program_rounds_no_embedding(tmp_path):
    model = small_vit(depth=0, embed_dim=16, **TABLES["37 bicubic"])
    model.embeds.proj = torch.nn.Identity()  # else autocast rounds the tokens
    module, program = exported(model, tmp_path / "model.pt2")
    inputs = inputs_of([(24, 24), (5, 30)], 576)
    inputs["patches"].zero_()

    with torch.no_grad():
        want = module(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            got = program.module()(**inputs)

    assert (got - want).abs().max() <= 2e-6 * want.abs().max()
