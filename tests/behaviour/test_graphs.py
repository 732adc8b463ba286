"""Whole NaFlexVits in one graph: torch.compile, torch.export, AOTInductor, ONNX Runtime, OpenVINO
against timm."""

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
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
    small_vit,
    trained,
    vit_batch,
)
from tests.support.running import running
from timm_naflex_fast import enable
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
    model, counter = small_vit(pos_embed=kind, depth=depth), CompileCounterWithBackend("aot_eager")
    run, generator = (
        torch.compile(model, backend=counter, fullgraph=True),
        torch.Generator().manual_seed(0),
    )
    for i in range(20):
        sizes = [
            tuple(s) for s in torch.randint(1, 12, (2 + i % 5, 2), generator=generator).tolist()
        ]
        batch = vit_batch(sizes, seed=i)
        want = trained(model, batch)
        with enable() if i else running():  # the calls of a finished graph are not counted
            assert far(trained(model, batch, run), want) <= 1e-5
    assert counter.frame_count == 2  # the first graph, and one in which sizes are free


@pytest.mark.parametrize(
    ("kind", "mode", "backend"),
    [("learned", "interpolate_cached", "eager"), ("learned", "grid_sample", "aot_eager")]
    + [slow(kind, "matmul", "inductor") for kind in ("learned", "factorized")],
)
def test_compiled_forward_and_backward(kind, mode, backend):
    if mode == "grid_sample" and (OLD_TORCH or not NEW_TIMM):
        pytest.skip("asks a module for a name, or reads the largest grid")
    model, counter = small_vit(pos_embed=kind, depth=1), CompileCounterWithBackend(backend)
    with running("grid_sample" if mode == "grid_sample" else "stock"):
        want = trained(model, BATCH)
    with running(mode):
        run = torch.compile(model, backend=counter, fullgraph=True)
        assert far(trained(model, BATCH, run), want) <= 1e-5
    assert counter.frame_count == 1


def test_autocast_in_a_graph_and_arguments_by_name():
    model, patches, rest = (
        small_vit(depth=1),
        BATCH["patches"],
        {k: v for k, v in BATCH.items() if k != "patches"},
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(patches, **rest)
        with running():
            got = torch.compile(model, backend="aot_eager", fullgraph=True)(patches, **rest)
    assert relative(got, want) <= 1e-2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_shapes_are_checked_while_tracing(fullgraph):
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=fullgraph)
    with (
        running(),
        pytest.raises(Exception, match=r"patch_coord must hold \(y, x\) for each token"),
    ):
        compiled(small_vit().embeds)(
            torch.randn(2, 12, 16), patch_coord=row_major([(2, 5), (1, 3)])
        )
    with pytest.raises(Exception, match=r"x must be tokens of shape \(B, N, 4\)"):
        compiled(add_pos_embed_)(torch.zeros(1, 6, 3), torch.zeros(6, 5, 4), row_major([(2, 3)]))
    with pytest.raises(
        ValueError, match="negative"
    ):  # by the operator: plain operations could not ask
        compiled(add_pos_embed_)(
            torch.zeros(1, 6, 4), torch.zeros(6, 5, 4), row_major([(2, 3)]) - 1
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Gives a small model as its inputs are named, its program with free sizes, and the ONNX file;
    made once."""

    @cache
    def made(kind, mode, size, strategy):
        model = small_vit(pos_embed=kind, pos_embed_interp_mode=mode, depth=1).eval()
        module, example, _, free = export.batches(model, size)
        file = tmp_path_factory.mktemp(kind) / "model.onnx"
        with torch.no_grad(), running(strategy):
            return module, export.write(module, example, free, file), file

    return made


@EXPORTS
@pytest.mark.parametrize("runtime", ["eager", *export.LOADERS])
@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [("learned", "bilinear", None), ("learned", "bicubic", SIZE)]
    + [
        slow("learned", "bicubic", None),
        slow("factorized", "bilinear", None),
        slow("factorized", "bilinear", SIZE),
    ],
)
def test_every_runtime_equals_stock_on_batches_lengths_and_grids_not_seen(
    runtime, kind, mode, size, files
):
    if runtime not in ("eager", *export.runtimes_for(Path("model.onnx"))):
        pytest.skip("it is not installed")
    module, program, file = files(kind, mode, size, "matmul")
    run = (
        (lambda inputs: module(**inputs))
        if runtime == "eager"
        else export.LOADERS[runtime](file, program)
    )
    batches = (
        [dict(image=torch.randn(n, 1, *SIZE)) for n in (1, 3)] if size else map(vit_batch, UNSEEN)
    )
    for inputs in batches:
        with torch.no_grad():
            want = module(**inputs)
            with running() if runtime == "eager" else nullcontext():
                assert relative(torch.as_tensor(run(inputs)), want) <= 1e-5


@EXPORTS
@pytest.mark.parametrize("strategy", ["matmul", slow("interpolate_cached")])
@pytest.mark.parametrize(
    ("kind", "mode", "size"), [("learned", "bilinear", None), ("learned", "bicubic", SIZE)]
)
def test_no_exported_program_resizes_or_needs_this_package(kind, mode, size, strategy, files):
    onnx = pytest.importorskip("onnx")
    _, program, file = files(kind, mode, size, strategy)
    assert not [
        node
        for node in program.graph.nodes
        if "upsample" in str(node.target) or "naflex" in str(node.target)
    ]
    operators = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert operators["MatMul"] and not operators["Resize"] and not operators["GridSample"]


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
    if form == "export":
        torch.export.save(program, tmp_path / "model.pt2")
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save(
        [(inputs, module(**inputs).detach()) for inputs in map(vit_batch, UNSEEN)],
        tmp_path / "results.pt",
    )
    command = [sys.executable, "-c", ALONE, form]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class Embeds(torch.nn.Module):
    """Padded embeddings from sizes (t, h, w), and without frames: for tokens, and by themselves."""

    def __init__(self, length):
        super().__init__()
        self.table, self.options = (
            torch.nn.Parameter(torch.randn(6, 5, 8)),
            dict(merge=2, length=length),
        )

    def forward(self, x, sizes):
        embed = partial(resample_pos_embeds, self.table, mode="bilinear", **self.options)
        made = [
            embed(some, padding=rest)
            for some in (sizes, sizes[:, 1:])
            for rest in ("zeros", "first")
        ]
        return torch.stack([add_pos_embed_(x * 1, self.table, grid_sizes=sizes[:, 1:]), *made])


@pytest.mark.parametrize("dtype", ["int64", *map(slow, ("uint8", "int8", "int16", "int32"))])
@pytest.mark.parametrize("how", ["compile", "export", "trace"])
def test_padded_embeddings_from_sizes_in_one_graph(how, dtype):
    model, x = Embeds(length=450), torch.zeros(3, 450, 8)
    sizes = torch.tensor([(2, 4, 4), (1, 6, 6), (3, 2, 2)], dtype=getattr(torch, dtype))
    other = torch.tensor(
        [(1, 2, 2), (2, 2, 8), (1, 20, 20)], dtype=sizes.dtype
    )  # more cells than 8 bits can count
    graph = written(how, model, x, sizes)
    for want, got in ((model(x, some), graph(x, some)) for some in (sizes, other)):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    weight = torch.randn_like(want)
    grads = [
        torch.autograd.grad((out * weight).sum(), m.table)[0]
        for out, m in ((got, graph), (want, model))
    ]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["compile", slow("export")])
def test_sizes_that_do_not_fit_are_noticed_in_a_graph(how):
    model = Embeds(length=20)
    x, good = torch.zeros(2, 20, 8), torch.tensor([(1, 2, 4), (1, 4, 4)])
    graph = written(how, model, x, good)
    torch.testing.assert_close(graph(x, good), model(x, good), atol=2e-6, rtol=0)
    for long_empty_or_odd in ((6, 4), (0, 4), (2, 3), (3, 2)):
        with pytest.raises(RuntimeError, match="grid_sizes must be at least 1, multiples of merge"):
            graph(x, torch.tensor([(1, 2, 4), (1, *long_empty_or_odd)]))


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_packed_embeddings_from_sizes_in_one_graph(strategy):
    table, sizes = torch.randn(6, 5, 8, requires_grad=True), [(3, 4), (7, 2)]

    def embed(table):
        packed = resample_pos_embeds(table, sizes, mode="bicubic", strategy=strategy)
        return packed, add_pos_embed_(
            torch.zeros(2, 15, 8), table, grid_sizes=sizes, strategy=strategy
        )

    graph = torch.compile(embed, backend="aot_eager", fullgraph=True)
    for want, got in zip(embed(table), graph(table)):
        torch.testing.assert_close(got, want, atol=2e-6 * (strategy == "matmul"), rtol=0)
        grads = [
            torch.autograd.grad(out.square().sum(), table, retain_graph=True)[0]
            for out in (got, want)
        ]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


# Of two samples: with frames, four columns, no integers; and of one sample alone.
@pytest.mark.parametrize(
    "sizes", [[s] * 2 for s in ((1, 3, 4), (1, 1, 3, 4), (3.0, 4.0), (True, True))] + [[(3, 4)]]
)
def test_sizes_that_do_not_fit_the_tokens(sizes):
    def add(x, sizes):
        return add_pos_embed_(x * 1, torch.ones(6, 5, 4), grid_sizes=sizes)

    for run in (add, torch.func.functionalize(add), torch.compile(add, fullgraph=True)):
        for given in (sizes, torch.tensor(sizes)):
            with pytest.raises(Exception, match="grid_sizes must hold"):
                run(torch.zeros(2, 12, 4), given)
