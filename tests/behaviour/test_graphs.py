"""Whole NaFlexVits in one graph, against timm.

By torch.compile, torch.export, AOTInductor, ONNX Runtime and OpenVINO.
"""

import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow, written
from tests.support.oracles import (
    BATCH,
    NEW_TIMM,
    OLD_TORCH,
    far,
    relative,
    row_major,
    seeded,
    small_vit,
    trained,
    vit_batch,
)
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.cli.export import runtimes_for
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.measure import export

EXPORTS = pytest.mark.skipif(
    OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind"
)
UNSEEN = [[(3, 4)], [(8, 8), (2, 30), (11, 3), (1, 17)], [(9, 1), (1, 1)], [(20, 21)] * 5]
SIZE = (12, 44)  # of a plain image, in pixels: a grid of 3 x 11


@pytest.mark.parametrize(
    ("kind", "depth"), [("learned", 0), slow("learned", 1), slow("factorized", 1)]
)
def test_twenty_shapes_train_in_one_graph_with_one_recompile(kind, depth):
    model = small_vit(pos_embed=kind, depth=depth)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    generator = seeded(0)

    for i in range(20):
        sizes = torch.randint(1, 12, (2 + i % 5, 2), generator=generator).tolist()
        batch = vit_batch(sizes, seed=i)
        want = trained(model, batch)
        # The calls of a finished graph are not counted.
        with running() if i == 0 else enable():
            assert far(trained(model, batch, run), want) <= 1e-5

    assert counter.frame_count == 2  # the first graph, and one in which sizes are free


@pytest.mark.parametrize(
    ("kind", "mode", "backend"),
    [
        ("learned", "interpolate_cached", "eager"),
        ("learned", "grid_sample", "aot_eager"),
        slow("learned", "matmul", "inductor"),
        slow("factorized", "matmul", "inductor"),
    ],
)
def test_compiled_forward_and_backward(kind, mode, backend):
    if mode == "grid_sample" and (OLD_TORCH or not NEW_TIMM):
        pytest.skip("asks a module for a name, or reads the largest grid")
    model = small_vit(pos_embed=kind, depth=1)
    with running("grid_sample" if mode == "grid_sample" else "stock"):
        want = trained(model, BATCH)
    counter = CompileCounterWithBackend(backend)

    with running(mode):
        run = torch.compile(model, backend=counter, fullgraph=True)
        got = trained(model, BATCH, run)

    assert far(got, want) <= 1e-5
    assert counter.frame_count == 1


def test_autocast_in_a_graph_and_arguments_by_name():
    model = small_vit(depth=1)
    patches = BATCH["patches"]
    by_name = {"patch_coord": BATCH["patch_coord"], "patch_valid": BATCH["patch_valid"]}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(patches, **by_name)
        with running():
            got = torch.compile(model, backend="aot_eager", fullgraph=True)(patches, **by_name)
    assert relative(got, want) <= 1e-2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_shapes_are_checked_while_tracing(fullgraph):
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=fullgraph)
    message = r"patch_coord must hold \(y, x\) for each token"
    with enable(), pytest.raises(Exception, match=message):
        coord = row_major([(2, 5), (1, 3)])
        compiled(small_vit().embeds)(torch.randn(2, 12, 16), patch_coord=coord)

    add = compiled(add_pos_embed_)
    table = torch.zeros(6, 5, 4)
    coord = row_major([(2, 3)])
    with pytest.raises(Exception, match=r"x must be tokens of shape \(B, N, 4\)"):
        add(torch.zeros(1, 6, 3), table, coord)
    # By the operator: plain operations could not ask.
    with pytest.raises(ValueError, match="negative"):
        add(torch.zeros(1, 6, 4), table, coord - 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function: a small model as its inputs are named, its program with free sizes, and the file
    of ONNX; made once."""

    @cache
    def make(kind, mode, size, strategy):
        model = small_vit(pos_embed=kind, pos_embed_interp_mode=mode, depth=1).eval()
        task = export.make_task(model, size)
        file = tmp_path_factory.mktemp(kind) / "model.onnx"
        with torch.no_grad(), running(strategy):
            program = export.write(task.module, task.example, task.free, file)
        return task.module, program, file

    return make


def unseen_inputs(size):
    """Plain images of ``size``, or batches of patches, that no program was written with."""
    if size is None:
        return [vit_batch(sizes) for sizes in UNSEEN]
    return [{"image": torch.randn(n, 1, *size)} for n in (1, 3)]


MODELS = [
    ("learned", "bilinear", None),
    ("learned", "bicubic", SIZE),
    slow("learned", "bicubic", None),
    slow("factorized", "bilinear", None),
    slow("factorized", "bilinear", SIZE),
]


@EXPORTS
@pytest.mark.parametrize("runtime", export.LOADERS)
@pytest.mark.parametrize(("kind", "mode", "size"), MODELS)
def test_every_runtime_equals_stock_on_batches_lengths_and_grids_not_seen(
    runtime, kind, mode, size, files
):
    if runtime not in runtimes_for(Path("model.onnx")):
        pytest.skip("it is not installed")
    module, program, file = files(kind, mode, size, "matmul")
    run = export.LOADERS[runtime](file, program)
    for inputs in unseen_inputs(size):
        with torch.no_grad():
            want = module(**inputs)
        assert relative(torch.as_tensor(run(inputs)), want) <= 1e-5


@EXPORTS
@pytest.mark.parametrize("strategy", ["matmul", slow("interpolate_cached")])
@pytest.mark.parametrize(("kind", "mode", "size"), MODELS[:2])
def test_no_exported_program_resizes_or_needs_this_package(kind, mode, size, strategy, files):
    onnx = pytest.importorskip("onnx")
    _, program, file = files(kind, mode, size, strategy)
    for node in program.graph.nodes:
        assert "upsample" not in str(node.target)
        assert "naflex" not in str(node.target)
    operators = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert operators["MatMul"] > 0
    assert operators["Resize"] == operators["GridSample"] == 0


ALONE = """
import sys
sys.modules["timm_naflex_fast"] = sys.modules["timm"] = None
import torch
load = torch._inductor.aoti_load_package if sys.argv[1] == "aoti" else lambda name: torch.export.load(name).module()
run = load("model.pt2")
for inputs, want in torch.load("results.pt"):
    assert (run(**inputs) - want).abs().max() <= 1e-5 * want.abs().max()
"""


@EXPORTS
@pytest.mark.slow
@pytest.mark.parametrize("form", ["export", "aoti"])
def test_saved_program_runs_in_a_fresh_process_without_this_package(form, files, tmp_path):
    module, program, _ = files("learned", "bicubic", None, "matmul")
    path = tmp_path / "model.pt2"
    if form == "export":
        torch.export.save(program, path)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    results = [(inputs, module(**inputs).detach()) for inputs in unseen_inputs(None)]
    torch.save(results, tmp_path / "results.pt")

    command = [sys.executable, "-c", ALONE, form]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr


class Embeds(torch.nn.Module):
    """Padded embeddings from sizes (t, h, w), and without frames."""

    def __init__(self, length):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 5, 8))
        self.length = length

    def forward(self, sizes):
        how = dict(mode="bilinear", merge=2, length=self.length)
        without_frames = sizes[:, 1:]
        found = []
        for some in (sizes, without_frames):
            for padding in ("zeros", "first"):
                found.append(resample_pos_embeds(self.table, some, padding=padding, **how))
        return torch.stack(found)


def check_gradients(got, got_table, want, want_table):
    weight = torch.randn_like(want)
    (got_grad,) = torch.autograd.grad((got * weight).sum(), got_table, retain_graph=True)
    (want_grad,) = torch.autograd.grad((want * weight).sum(), want_table, retain_graph=True)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int64", *map(slow, ("uint8", "int8", "int16", "int32"))])
@pytest.mark.parametrize("how", ["compile", "export", "trace"])
def test_padded_embeddings_from_sizes_in_one_graph(how, dtype):
    model = Embeds(length=450)
    sizes = torch.tensor([(2, 4, 4), (1, 6, 6), (3, 2, 2)], dtype=getattr(torch, dtype))
    # More cells than 8 bits can count.
    other = torch.tensor([(1, 2, 2), (2, 2, 8), (1, 20, 20)], dtype=sizes.dtype)

    graph = written(how, model, sizes)

    torch.testing.assert_close(graph(sizes), model(sizes), atol=2e-6, rtol=0)
    got = graph(other)
    want = model(other)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    check_gradients(got, graph.table, want, model.table)


@pytest.mark.parametrize("how", ["compile", slow("export")])
def test_sizes_that_do_not_fit_are_noticed_in_a_graph(how):
    model = Embeds(length=20)
    good = torch.tensor([(1, 2, 4), (1, 4, 4)])
    graph = written(how, model, good)
    torch.testing.assert_close(graph(good), model(good), atol=2e-6, rtol=0)
    for long_empty_or_odd in ((6, 4), (0, 4), (2, 3), (3, 2)):
        bad = torch.tensor([(1, 2, 4), (1, *long_empty_or_odd)])
        with pytest.raises(RuntimeError, match="grid_sizes must be at least 1, multiples of merge"):
            graph(bad)


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_packed_embeddings_from_sizes_in_one_graph(strategy):
    table = torch.randn(6, 5, 8, requires_grad=True)
    sizes = [(3, 4), (7, 2)]

    def embed(table):
        how = dict(mode="bicubic", strategy=strategy)
        packed = resample_pos_embeds(table, sizes, **how)
        return packed, resample_pos_embeds(table, sizes, length=15, **how)

    graph = torch.compile(embed, backend="aot_eager", fullgraph=True)

    rounding = 2e-6 if strategy == "matmul" else 0
    for got, want in zip(graph(table), embed(table), strict=True):
        torch.testing.assert_close(got, want, atol=rounding, rtol=0)
        check_gradients(got, table, want, table)
