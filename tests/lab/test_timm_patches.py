"""The patches of lab/timm: against the loop of the installed timm, and each in a copy of timm."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.export import Dim

from lab.timm import patched, race
from lab.timm.patched import copy_patched, load_embeds
from tests.support.checks import one_by_one, run
from tests.support.oracles import BASE, OLD_TORCH, Case, cases, relative, seeded, stock
from tests.support.running import ran

pytestmark = pytest.mark.skipif(
    patched.timm.__version__ != patched.RELEASE, reason=patched.NEEDS_RELEASE
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
KINDS = st.sampled_from(["learned", "factorized"])
# Numbers of coordinates; float32 ones with a fraction, which timm cuts.
NUMBERS = (torch.int64, torch.int32, torch.uint8, torch.float32)
SIZES = [(16, 16), (9, 28), (25, 10), (1, 40), (40, 1), (5, 7)]
PATCHES = ["ten_lines", "forty_lines"]


LOADED = {}  # a graph cannot load it


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """The patched classes."""
    for patch in PATCHES:
        LOADED[patch] = load_embeds(patch)


def ten(case, embeds, x, coord):
    getattr(LOADED["ten_lines"], f"_apply_{case.kind}_naflex_pos_embed")(embeds, x, coord)
    return x


def forty(case, embeds, x, coord):
    LOADED["forty_lines"]._apply_learned_naflex_pos_embed_matmul(embeds, x, coord)
    return x


def in_float64(case, embeds, x, coord):
    """What the loop computes, in float64; the table is rounded to float32, as there."""
    added = []
    sizes = (coord.amax(1).long() + 1).tolist()  # smaller in a batch shorter than a grid
    for image in one_by_one(embeds.pos_embed[0].float(), sizes, **case.options):
        tokens = image[: case.length]
        added.append(F.pad(tokens, (0, 0, 0, case.length - len(tokens))))
    return (x + torch.stack(added)).to(x.dtype)


def drawn(data, case):
    """Tables of any dtype, tokens that need not be contiguous, coordinates of any numbers."""
    embeds = case.embeds().to(data.draw(st.sampled_from(DTYPES)))
    x = case.x()
    x[:, ::3] = -0.0
    if data.draw(st.booleans()):
        x = x.mT.contiguous().mT
    coord = case.coord().to(data.draw(st.sampled_from(NUMBERS)))
    if coord.is_floating_point():
        coord = coord + 0.5
    return embeds, x, coord


def bits(tensor):
    """Equal for equal numbers alone: 0.0 and -0.0 differ."""
    return torch.stack([tensor.double(), torch.signbit(tensor).double()])


@given(data=st.data())
def test_ten_lines_give_the_bits_of_the_loop_and_of_its_gradients(data):
    # With fewer than 32 channels PyTorch sums the gradients of 5 images or more of one grid in
    # another order: the table's may differ in the last bit.
    case = data.draw(cases(DTYPES, kind=data.draw(KINDS), channels=32))
    embeds, x, coord = drawn(data, case)
    with torch.autocast("cpu", torch.bfloat16, enabled=data.draw(st.booleans())):
        got, got_gx, got_tables = run(ten, case, embeds, coord, x.clone())
        want, want_gx, want_tables = run(stock, case, embeds, coord, x.clone())
    assert got.dtype is want.dtype
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(got_gx, want_gx)
    assert all(map(torch.equal, got_tables, want_tables))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
@given(data=st.data())
def test_forty_lines_and_their_gradients_are_rounding_away_from_float64(antialias, mode, data):
    # Not from the loop: the larger a coordinate, the coarser it is in float32, and PyTorch reads its
    # weights off it. On a table 128 wide the loop's gradient is 1.7e-5 away, theirs 7e-7.
    case = data.draw(cases(DTYPES, antialias=antialias, mode=mode))
    embeds, x, coord = drawn(data, case)
    autocast = data.draw(st.booleans())

    def add(*args):  # autocast in the forward pass alone, as PyTorch asks for
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return forty(*args)

    got, got_gx, (grad,) = run(add, case, embeds, coord, x.clone())
    _, want_gx, (want_grad,) = run(in_float64, case, embeds, coord, x.clone())

    exact = in_float64(case, embeds, torch.zeros(x.shape, dtype=torch.float64), coord).detach()
    off = 2e-6 * max(1, embeds.pos_embed.abs().max().item())
    least = x + (exact - off).to(case.dtype)
    greatest = x + (exact + off).to(case.dtype)
    is_padding = torch.arange(case.length) >= (coord.amax(1, keepdim=True).long() + 1).prod(2)
    assert ((least <= got) & (got <= greatest))[~is_padding].all()
    assert torch.equal(bits(got[is_padding]), bits(x[is_padding]))
    assert torch.equal(got_gx, want_gx)
    assert relative(grad, want_grad) <= max(1e-5, torch.finfo(grad.dtype).eps)


@pytest.mark.parametrize("way", [ten, forty])
def test_an_empty_batch(way):
    case = Case(sizes=[], length=9)
    coord = torch.zeros(0, 9, 2, dtype=torch.int64)
    assert way(case, BASE.embeds(), torch.zeros(0, 9, 4), coord).shape == (0, 9, 4)


@pytest.mark.parametrize("way", [ten, forty])
@pytest.mark.parametrize("antialias", [True, False])
def test_second_derivatives_are_the_loops(way, antialias):
    case = Case(antialias=antialias)
    embeds = case.embeds()
    seconds = []
    for add in (way, stock):
        upstream = torch.randn(case.x().shape, generator=seeded(1)).requires_grad_()
        out = add(case, embeds, case.x(), case.coord())
        (grad,) = torch.autograd.grad(out, embeds.pos_embed, upstream, create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), upstream)
    assert relative(*seconds) <= 1e-5


class Adds(torch.nn.Module):
    """Tokens with their embeddings: no input of a graph may be written to."""

    def __init__(self, way, case):
        super().__init__()
        self.way = way
        self.case = case
        self.embeds = case.embeds()

    def forward(self, x, coord):
        """The sum (B, N, C)."""
        return self.way(self.case, self.embeds, x * 1, coord)


@pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler and export trace less")
@pytest.mark.parametrize("antialias, mode", [(True, "bicubic"), (False, "bilinear")])
def test_forty_lines_train_in_one_graph_and_an_exported_program_serves_other_grids(antialias, mode):
    case = Case(table_size=(16, 16), mode=mode, antialias=antialias, sizes=SIZES)
    module = Adds(forty, case)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    dynamic = {0: Dim("batch", max=64), 1: Dim("length", max=1024)}
    program = torch.export.export(module, (case.x(), case.coord()), dynamic_shapes=(dynamic,) * 2)
    counters.clear()
    for sizes in (SIZES, [(3, 9), (12, 12), (7, 2)]):
        x, coord = Case(sizes=sizes).x(), Case(sizes=sizes).coord()
        want = stock(case, module.embeds, x * 1, coord)
        (want_grad,) = torch.autograd.grad(want.square().sum(), module.embeds.pos_embed)
        got = compiled(x, coord)
        (grad,) = torch.autograd.grad(got.square().sum(), module.embeds.pos_embed)
        for result in (got, program.module()(x, coord)):
            torch.testing.assert_close(result, want, rtol=0, atol=2e-5)
        assert relative(grad, want_grad) <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1


def test_ten_lines_are_ten():
    patch = (patched.HERE / "ten_lines.patch").read_text()
    _, code = patch.split("+++ b/timm/models/naflexvit.py\n")
    assert len(re.findall(r"^\+ *[^# \n]", code, re.M)) == 10


@pytest.fixture(scope="module")
def timms_tests(tmp_path_factory):
    """A folder with the tests of the installed timm, from its source package."""
    folder = tmp_path_factory.mktemp("timm")
    command = "uv run --with pip --with setuptools python tests/support/timm_source.py".split()
    subprocess.run([*command, folder], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "patches", [PATCHES[:1], PATCHES[1:], PATCHES, PATCHES[::-1]], ids="+".join
)
def test_patched_timm_passes_timms_naflex_tests_and_those_of_the_patches(
    patches, timms_tests, tmp_path
):
    copy_patched(tmp_path, *patches)
    shutil.copytree(timms_tests / "tests", tmp_path / "tests", dirs_exist_ok=True)
    shutil.copy(timms_tests / "pyproject.toml", tmp_path)
    files = ["test_models.py", "test_naflex_dataset.py"]
    files += [path.name for path in (tmp_path / "tests").glob("test_naflexvit_pos_embed*.py")]
    command = [sys.executable, "-m", "pytest", "-k", "test_naflexvit or test_naflex_dataset"]
    ended = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout


@ran("matmul")
def test_the_race_shows_who_has_the_loops_bits(tmp_path, monkeypatch, capsys):
    file = tmp_path / "race.json"
    small = ["race.py", "--batch=2", "--channels=4", "--rounds=2", f"--json={file}"]
    monkeypatch.setattr("sys.argv", small)
    race.main()
    assert "equal bits" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 30
    for row in rows:
        who = row["contender"]
        assert (row["off"] > 0.1) == (who == "timm's flag")
        assert row["bits"] or who not in (race.LOOP, "ten lines")
        assert not row["host_waits"] or who != "forty lines"
