"""Exported programs of whole NaFlexVits, and of their embeddings alone.

In every runtime they give timm's result; they hold no float64 and nothing of this package.
"""

import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
import torch

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.commands.cli.export import runtimes_for
from timm_naflex_fast.commands.measure import export

pytestmark = pytest.mark.skipif(
    OLD_TORCH or not hasattr(torch.compiler, "_is_exporting_flag"),
    reason="this torch does not tell an export from other tracing",
)
ALIGNED = {"pos_embed_align_corners": True}
LINEAR = {"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False}
# The strategy ("grid_sample": by timm's flag), the sides of the table, and timm's options.
TABLES = {
    "16 bilinear": ("matmul", (16, 16), {"pos_embed_interp_mode": "bilinear"}),
    "37 bicubic": ("matmul", (37, 37), {}),
    "37 by interpolate_cached": ("interpolate_cached", (37, 37), {}),
    "37 bicubic, not antialiased": ("matmul", (37, 37), {"pos_embed_antialias": False}),
    "128 as in RADIO": ("matmul", (128, 128), LINEAR | ALIGNED | {"pos_embed_ar_preserving": True}),
    "128 not antialiased": ("matmul", (128, 128), LINEAR),
    "128 bicubic, grid_sample": ("grid_sample", (128, 128), ALIGNED),
    "factorized": ("matmul", (16, 16), {"pos_embed": "factorized"}),
}
# Of every kind: one cell, one row, one column, the table's own size, 1,024 tokens.
UNSEEN = [
    [(1, 1)],
    [(3, 4), (2, 2), (1, 12)],
    [(24, 24), (5, 30), (30, 5), (1, 100), (100, 1), (16, 16)],
    [(32, 32), (37, 27), (1, 1024), (1024, 1), (13, 77)],
]
IMAGE = (12, 44)  # the size of a plain image, in pixels: a grid of 3 x 11
# Operators that coremltools 9 does not convert.
aten = torch.ops.aten
UNKNOWN = [aten.prod.dim_int, aten.bitwise_or.Tensor, aten.__or__.Tensor]
TOLERANCES = {"model": 1e-5, "embeddings": 2e-6}

# The table, what is exported, and the size of its images.
PROGRAMS = [
    slow("37 bicubic", "model", None),
    ("16 bilinear", "model", IMAGE),
    ("37 bicubic", "embeddings", None),
    slow("factorized", "model", IMAGE),
]
for name, part in product(TABLES, TOLERANCES):
    if name != "37 bicubic":
        PROGRAMS.append(slow(name, part, None))

# In a process of its own: a worker that loads and unloads many packages may crash.
ALONE = """
import sys
sys.modules["timm_naflex_fast"] = sys.modules["timm"] = None
import torch
form, file = sys.argv[1:]
run = torch._inductor.aoti_load_package(file) if form == "aoti" else torch.export.load(file).module()
torch.save([run(**inputs) for inputs in torch.load("inputs.pt")], "outputs.pt")
"""


def write(name, part, size, folder):
    """A module, its program with free sizes, and the file of ONNX."""
    strategy, grid, options = TABLES[name]
    by_flag = strategy == "grid_sample"
    options = dict(options, pos_embed_grid_size=grid, pos_embed_use_grid_sample=by_flag)
    model = small_vit(depth=1, **options).eval()
    batches, free = export.make_inputs(model, size)
    if part == "embeddings":
        model = export.position_embeddings(model)
    module = export.Naflex(model).eval()
    file = folder / "model.onnx"
    with torch.no_grad(), running(strategy, strict=True):
        program = export.write(module, batches[0], free, file)
    return module, program, file


def unseen_inputs(size):
    """Plain images of ``size``, or batches of patches, that no program was written with."""
    if size is None:
        return [vit_batch(sizes) for sizes in UNSEEN]
    return [{"image": torch.randn(n, 1, *size)} for n in (1, 3)]


def check(module, part, batches, outputs):
    for inputs, output in zip(batches, outputs, strict=True):
        with torch.no_grad():
            want = module(**inputs)
        largest = want.abs().max()
        assert largest > 0.01
        assert (torch.as_tensor(output) - want).abs().max() <= TOLERANCES[part] * largest


@pytest.mark.parametrize(("name", "part", "size"), PROGRAMS)
def test_every_runtime_equals_timm_on_batches_lengths_and_grids_not_seen(
    name, part, size, tmp_path
):
    """And no program holds float64, a resize or this package."""
    onnx = pytest.importorskip("onnx")
    module, program, file = write(name, part, size, tmp_path)
    batches = unseen_inputs(size)
    for runtime in runtimes_for(file):
        run = export.LOADERS[runtime](file, program)
        check(module, part, batches, [run(inputs) for inputs in batches])

    for node in program.graph.nodes:
        assert "upsample" not in str(node.target)
        assert "naflex" not in str(node.target)
        assert node.target not in UNKNOWN
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or value.dtype is not torch.float64

    graph = onnx.shape_inference.infer_shapes(onnx.load(file)).graph
    operators = Counter(node.op_type for node in graph.node)
    assert operators["Resize"] == operators["GridSample"] == 0
    values = [*graph.value_info, *graph.input, *graph.output]
    dtypes = {value.type.tensor_type.elem_type for value in values}
    dtypes |= {tensor.data_type for tensor in graph.initializer}
    assert onnx.TensorProto.DOUBLE not in dtypes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name", "part"),
    [
        ("export", "37 bicubic", "model"),
        ("aoti", "37 bicubic", "model"),
        ("aoti", "37 bicubic", "embeddings"),
        ("aoti", "128 as in RADIO", "embeddings"),
    ],
)
def test_a_saved_program_runs_in_a_fresh_process_without_this_package(form, name, part, tmp_path):
    module, program, _ = write(name, part, None, tmp_path)
    file = str(tmp_path / "model.pt2")
    if form == "export":
        torch.export.save(program, file)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    batches = unseen_inputs(None)
    torch.save(batches, tmp_path / "inputs.pt")

    subprocess.run([sys.executable, "-c", ALONE, form, file], cwd=tmp_path, check=True, timeout=300)

    check(module, part, batches, torch.load(tmp_path / "outputs.pt"))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached", "grid_sample"])
def test_a_torchscript_trace_serves_batches_lengths_and_grids_not_seen(mode):
    model = small_vit(depth=1, pos_embed_use_grid_sample=mode == "grid_sample")
    module = export.Naflex(model).eval()
    inputs = vit_batch([(3, 4), (2, 2)])
    with torch.no_grad(), running(mode, strict=True):
        traced = torch.jit.trace(module, example_kwarg_inputs=inputs, check_trace=False)
    batches = unseen_inputs(None)
    with torch.no_grad():
        outputs = [traced(**batch) for batch in batches]

    check(module, "model", batches, outputs)


def test_autocast_around_an_exported_program_rounds_no_embedding(tmp_path):
    model = small_vit(depth=0, embed_dim=16, pos_embed_grid_size=(37, 37))
    model.embeds.proj = torch.nn.Identity()  # else autocast rounds the tokens
    batches, free = export.make_inputs(model, size=None)
    module = export.Naflex(export.position_embeddings(model)).eval()
    with torch.no_grad(), enable(strict=True):
        program = export.write(module, batches[0], free, tmp_path / "model.pt2")
    inputs = vit_batch([(24, 24), (5, 30)])
    inputs["patches"].zero_()

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got = program.module()(**inputs)

    check(module, "embeddings", [inputs], [got])
