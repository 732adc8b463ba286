"""Whole NaFlexVits in one graph: torch.compile, torch.export, AOTInductor and ONNX against unpatched timm."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.oracles import BATCH, OLD_TORCH, relative, row_major, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.backends import (
    portable,
)
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.resampling.matrices import ResizeSpec

EXPORTS = pytest.mark.skipif(OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind")
UNSEEN = [[(3, 4)], [(8, 8), (2, 30), (11, 3), (1, 17)], [(9, 1), (1, 1)], [(20, 21)] * 5]
KINDS = ["learned", "factorized"]
TABLES = {"learned": ["pos_embed"], "factorized": ["pos_embed_y", "pos_embed_x"]}


def step(model, batch, kind, run=None):
    """Output and table gradients of one forward and backward."""
    model.zero_grad()
    out = (model if run is None else run)(batch)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (out * weight).mean().backward()
    return out.detach(), [getattr(model.embeds, name).grad.clone() for name in TABLES[kind]]


ONE_FAST = [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]


@pytest.fixture(scope="module", params=ONE_FAST)
def compiled(request):
    """A model compiled once, and what counts its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = small_vit(pos_embed=request.param)
    yield model, torch.compile(model, backend=counter, fullgraph=True), counter, request.param
    torch._dynamo.reset()


def test_twenty_shapes_train_in_one_graph_with_one_recompile(compiled):
    model, run, counter, kind = compiled
    generator = torch.Generator().manual_seed(0)
    for i in range(20):
        sizes = [tuple(s) for s in torch.randint(1, 12, (2 + i % 5, 2), generator=generator).tolist()]
        batch = vit_batch(sizes, seed=i)
        want, want_grads = step(model, batch, kind)
        with enable() if i else running():  # the calls of a finished graph are not counted
            got, got_grads = step(model, batch, kind, run)
        assert relative(got, want) <= 1e-5
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_grads, want_grads))
    assert counter.frame_count == 2  # the first graph, and one in which sizes are free


def test_arguments_by_name_as_timm_takes_them(compiled):
    model, run, _, _ = compiled
    patches, rest = BATCH["patches"], {k: v for k, v in BATCH.items() if k != "patches"}
    with torch.no_grad():
        want = model(patches, **rest)
        with enable():
            assert relative(run(patches, **rest), want) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_forward_and_backward(kind):
    model = small_vit(pos_embed=kind)
    want, want_grads = step(model, BATCH, kind)
    with running():
        got, got_grads = step(model, BATCH, kind, torch.compile(model, fullgraph=True))
    assert relative(got, want) <= 1e-5 and all(relative(a, b) <= 1e-5 for a, b in zip(got_grads, want_grads))


@pytest.mark.slow
def test_the_plain_operations_compile_with_their_backward():
    table = torch.randn(1, 6, 5, 8, requires_grad=True)
    coord, spec = row_major([(3, 4), (9, 2), (6, 5)]), ResizeSpec("bicubic")

    def add(table):
        x = torch.zeros(3, coord.shape[1], 8)
        portable.add(x, (table,), coord, spec)
        return x

    want, got = add(table), torch.compile(add, fullgraph=True)(table)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_autocast_in_a_graph():
    model = small_vit()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(BATCH)
        with running():
            got = torch.compile(model, backend="aot_eager", fullgraph=True)(BATCH)
    assert relative(got, want) <= 1e-2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_shapes_are_checked_while_tracing(fullgraph):
    embeds = small_vit().embeds
    with running():
        run = torch.compile(embeds, backend="aot_eager", fullgraph=fullgraph)
        with pytest.raises(Exception, match=r"patch_coord must hold \(y, x\) for each token"):
            run(torch.randn(2, 12, 16), patch_coord=row_major([(2, 5), (1, 3)]))
    with pytest.raises(Exception, match=r"x must be tokens of shape \(B, N, 4\)"):
        torch.compile(add_pos_embed_, backend="aot_eager", fullgraph=fullgraph)(
            torch.zeros(1, 6, 3), torch.zeros(6, 5, 4), row_major([(2, 3)])
        )


def exported(kind, strict=False):
    """A small model's program with dynamic batch and length, and the model."""
    model, batch = small_vit(pos_embed=kind).eval(), vit_batch([(3, 4), (5, 2), (4, 4)])
    free = {0: torch.export.Dim("B", min=1, max=64), 1: torch.export.Dim("N", min=2, max=4096)}
    with running():
        program = torch.export.export(model, (batch,), dynamic_shapes=(dict.fromkeys(batch, free),), strict=strict)
    return program, model


@EXPORTS
@pytest.mark.parametrize("kind", ONE_FAST)
@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_exported_program_equals_stock_on_unseen_grids(kind, strict):
    program, model = exported(kind, strict)
    assert not any("timm_naflex_fast" in str(node.target) for node in program.graph.nodes)
    run = program.module()
    for sizes in UNSEEN:
        batch = vit_batch(sizes, seed=5)
        with torch.no_grad():
            assert relative(run(batch), model(batch)) <= 1e-5


ALONE = """
import sys
sys.modules["timm_naflex_fast"] = sys.modules["timm"] = None
import torch
batch, want = torch.load("data.pt")
if "{form}" == "export":
    run = torch.export.load("model.pt2").module()
else:
    run = torch._inductor.aoti_load_package("model.pt2")
assert (run(batch) - want).abs().max() <= 1e-5 * want.abs().max()
"""


@EXPORTS
@pytest.mark.slow
@pytest.mark.parametrize("form", ["export", "aoti"])
def test_saved_program_runs_in_a_fresh_process_without_this_package(form, tmp_path):
    program, model = exported("learned")
    if form == "export":
        torch.export.save(program, tmp_path / "model.pt2")
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    batch = vit_batch(UNSEEN[1], seed=5)
    with torch.no_grad():
        torch.save((batch, model(batch)), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(form=form)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@EXPORTS
@pytest.mark.slow
def test_onnx_program_equals_stock_on_unseen_grids(tmp_path):
    missing = [n for n in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    import onnxruntime

    program, model = exported("learned")
    torch.onnx.export(program, dynamo=True).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [node.name for node in session.get_inputs()]
    for sizes in UNSEEN:
        batch = vit_batch(sizes, seed=5)
        (got,) = session.run(None, dict(zip(names, (value.numpy() for value in batch.values()))))
        with torch.no_grad():
            assert relative(torch.from_numpy(got), model(batch)) <= 1e-5


def test_interpolate_cached_breaks_the_graph_and_stays_right():
    model, seen = small_vit(), []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    with torch.no_grad():
        want = model(BATCH)
        with running("interpolate_cached"):
            assert relative(torch.compile(model, backend=backend)(BATCH), want) <= 1e-5
    assert len(seen) >= 2


@pytest.mark.parametrize(
    ("padding", "columns"),
    [("zeros", 3), ("first", 2), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("zeros", 2), ("first", 3)))],
)
@pytest.mark.parametrize("spec", ["compile", "export"])
def test_padded_embeddings_from_sizes_in_one_graph(padding, spec, columns):
    class Embed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(6, 5, 8))

        def forward(self, sizes):
            settings = dict(mode="bilinear", length=40, padding=padding, merge=2)
            return resample_pos_embeds(self.table, sizes, **settings)

    model = Embed()
    sizes, other = torch.tensor([[2, 4, 4], [1, 6, 6], [3, 2, 2]]), torch.tensor([[1, 2, 2], [2, 2, 8], [1, 4, 10]])
    sizes, other = sizes[:, 3 - columns :], other[:, 3 - columns :]
    if spec == "compile":
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        graph = torch.export.export(model, (sizes,)).module()
    for some in (sizes, other):
        want, got = model(some), graph(some)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((out * weight).sum(), m.table)[0] for out, m in ((got, graph), (want, model))]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_packed_embeddings_from_sizes_in_one_graph():
    table, sizes = torch.randn(6, 5, 8, requires_grad=True), [(3, 4), (7, 2)]

    def embed(table):
        return resample_pos_embeds(table, sizes, mode="bicubic")

    want, got = embed(table), torch.compile(embed, backend="aot_eager", fullgraph=True)(table)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["compile", "export"])
@pytest.mark.parametrize("wrong", [[(3, 4), (7, 3)], [(3, 4), (0, 5)], [(3, 4), (2, 3)]], ids=["long", "empty", "odd"])
def test_sizes_that_do_not_fit_are_noticed_in_a_graph(spec, wrong):
    class Embed(torch.nn.Module):
        def __init__(self, merge):
            super().__init__()
            self.merge, self.table = merge, torch.nn.Parameter(torch.randn(6, 5, 8))

        def forward(self, sizes):
            return resample_pos_embeds(self.table, sizes, mode="bilinear", length=20, merge=self.merge)

    model, good, wrong = Embed(2 if wrong[1] == (2, 3) else 1), torch.tensor([(2, 4), (4, 4)]), torch.tensor(wrong)
    if spec == "compile":
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        graph = torch.export.export(model, (good,)).module()
    torch.testing.assert_close(graph(good), model(good), atol=2e-6, rtol=0)
    with pytest.raises(RuntimeError, match="grid_sizes must be at least 1, multiples of merge"):
        graph(wrong)


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_sizes_for_tokens_in_a_graph(strategy):
    table, sizes = torch.randn(6, 5, 8), [(3, 4), (7, 2)]

    def embed(x):
        return add_pos_embed_(x * 1, table, grid_sizes=sizes, strategy=strategy)

    x = torch.randn(2, 15, 8)
    got = torch.compile(embed, backend="aot_eager", fullgraph=strategy == "matmul")(x)
    torch.testing.assert_close(got, embed(x), atol=2e-6, rtol=0)
