"""``naflex-fast export``: what is verified is written, what is wrong is not, and what is printed
runs the file."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH
from tests.support.running import ran
from timm_naflex_fast.commands.cli import export as command
from timm_naflex_fast.commands.cli.export import RUNTIMES
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.measure import export as work
from timm_naflex_fast.commands.measure.images import NaFlexImages
from timm_naflex_fast.commands.measure.models import load_model

KWARGS = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
SMALL = ["--random-weights", "--model-kwargs", *(f"{key}={n}" for key, n in KWARGS.items())]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "export.md"
NAFLEX = []
PLAIN = ["--size", "32", "48"]
INPUTS = {
    "pictures": [Image.new("RGB", (64, 48)), Image.new("RGB", (40, 90))],
    "image": torch.ones(2, 3, 32, 48),
}
MODEL = "naflexvit_base_patch16_gap"
EXPORTS = pytest.mark.skipif(
    OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind"
)


def export(out, *options):
    return main(["export", "--model", MODEL, *SMALL, "--out", str(out), *options])


@EXPORTS
@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        (".pt2", NAFLEX),
        slow(".pt2", PLAIN),
        slow(".onnx", NAFLEX),
        slow(".onnx", PLAIN),
    ],
)
def test_the_printed_lines_run_the_file(suffix, options, tmp_path, capsys):
    file = tmp_path / f"m{suffix}"
    with ran("matmul"):
        assert export(file, *options) == 0
    assert [*tmp_path.iterdir()] == [file]

    out = capsys.readouterr().out
    right = re.findall(r"^(.*?)  +float32.*\S+e-0\d +\S+e-\d\d  right$", out, re.M)
    assert right == [*RUNTIMES[suffix]]
    assert "dtypes: bool, float32, int64\n" in out if not options else "float64" not in out
    names = dict(INPUTS)
    exec(out[out.index("import ") :], names)
    assert names["output"].shape == (2, 5)
    assert names["settings"]["model"] == MODEL


@EXPORTS
@pytest.mark.parametrize("factor", [0.5, slow(torch.nan)])
def test_a_file_that_a_runtime_gets_wrong_is_not_written(factor, tmp_path, capsys, monkeypatch):
    def load(file, program):
        def wrong(inputs):
            output = program.module()(**inputs)
            return factor * output if len(output) == 1 else output

        return {"float32": wrong}

    monkeypatch.setitem(work.LOADERS, "torch.export", load)
    file = tmp_path / "m.pt2"
    file.write_text("the old one")
    assert export(file) == 1
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "the old one"
    out = capsys.readouterr().out
    assert re.search(r"^torch\.export .*wrong$", out, re.M) and f"not written: {file}" in out


def test_a_size_that_the_patches_do_not_fill_is_one_line(tmp_path, capsys):
    out = tmp_path / "m.pt2"
    assert export(out, "--size", "33", "48") == 2
    loading, line = capsys.readouterr().err.splitlines()
    assert loading.startswith("loading ")
    assert line.startswith("naflex-fast export: --size must be a multiple of the model's patches")
    assert not out.exists()


def test_a_folder_whose_name_is_not_utf_8_is_told_at_once(tmp_path, capsys, monkeypatch):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    assert export("m.onnx") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a file's name must be UTF-8" in line


def test_a_model_that_takes_no_patches_is_one_line(tmp_path, capsys):
    options = ["--model", MODEL, *SMALL, "embed_proj_type=conv"]
    assert main(["export", *options, "--out", str(tmp_path / "m.pt2")]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert "takes no patches; valid: --size H W" in line


@pytest.fixture
def loaded(monkeypatch):
    """A function that gives ONNX's loaders runs that are right, or off by a half, by precision."""

    def replace(runtime, **factors):
        def load(file, program):
            module = program.module()

            def run(factor):
                return lambda inputs: factor * module(**inputs)

            return {precision: run(factor) for precision, factor in factors.items()}

        monkeypatch.setitem(work.LOADERS, runtime, load)

    return replace


def installed(monkeypatch, *modules):
    """Let the command find these modules alone."""
    monkeypatch.setattr(
        command,
        "find_spec",
        lambda name: importlib.util.find_spec(name) if name in modules else None,
    )


@EXPORTS
def test_each_precision_has_a_line_and_float32_decides(loaded, tmp_path, capsys, monkeypatch):
    loaded("torch.export", bfloat16=0.5, float32=1.0)
    monkeypatch.setitem(work.SET_FLOAT32, "torch.export", "load(FILE, 'f32')")
    file = tmp_path / "m.pt2"

    assert export(file, "--json", str(tmp_path / "found.json")) == 0

    out = capsys.readouterr().out
    assert re.search(
        r"^torch\.export  bfloat16, its default here .*  not right: set float32$", out, re.M
    )
    assert re.search(r"^torch\.export  float32  .*  right$", out, re.M)
    assert f"torch.export in float32: load('{file}', 'f32')\n" in out
    found = json.loads((tmp_path / "found.json").read_text())
    kinds = [(line["precision"], line["is_default"], line["right"]) for line in found["checks"]]
    assert kinds == [("bfloat16", True, False), ("float32", False, True)]
    assert found["written"]


@EXPORTS
def test_openvino_is_measured_in_its_own_default_too(tmp_path):
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
    file = tmp_path / "m.onnx"
    torch.onnx.export(program, dynamo=True, verbose=False).save(file)

    default, *others = work.LOADERS["OpenVINO"](file, program)

    hint = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    assert default == {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[hint]
    assert "float32" in [default, *others]


@EXPORTS
def test_an_onnx_file_that_no_onnx_runtime_checked_has_a_status_of_its_own(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("onnxscript")
    installed(monkeypatch, "torch", "onnxscript")

    assert export(tmp_path / "m.onnx", *PLAIN) == 3

    written = f"written: {tmp_path / 'm.onnx'}\nnot checked in an ONNX runtime: none is installed"
    assert written in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "3 an ONNX file is written, but" in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    """A file that was written with ``--max-seq-len 64``."""
    pytest.importorskip("onnxscript")
    file = tmp_path_factory.mktemp("exported") / "model.onnx"
    assert export(file, "--max-seq-len", "64") == 0
    return file


@EXPORTS
def test_an_onnx_file_names_its_axes_and_its_model(onnx_file):
    onnx = pytest.importorskip("onnx")

    found = onnx.load(onnx_file)
    shapes = {}
    for value in (*found.graph.input, *found.graph.output):
        sizes = value.type.tensor_type.shape.dim
        shapes[value.name] = [size.dim_param or size.dim_value for size in sizes]
    assert shapes == {
        "patches": ["batch", "tokens", 768],
        "patch_coord": ["batch", "tokens", 2],
        "patch_valid": ["batch", "tokens"],
        "output": ["batch", 5],
    }
    metadata = {entry.key: entry.value for entry in found.metadata_props}
    assert metadata["model"] == MODEL
    assert metadata["patch_size"] == "[16, 16]" and metadata["max_seq_len"] == "64"
    assert len(metadata["weights_sha256"]) == 64
    for package in ("timm_naflex_fast", "timm", "torch"):
        assert metadata[package] == importlib.import_module(package).__version__


@EXPORTS
def test_the_page_leads_from_a_picture_to_the_output(onnx_file, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    monkeypatch.chdir(onnx_file.parent)
    picture = Image.radial_gradient("L").resize((300, 200)).convert("RGB")
    picture.save("photo.jpg")
    set_float32, run, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {}

    exec(set_float32 + run, names)

    model, _ = load_model(MODEL, random_weights=True, **KWARGS)
    jpeg = Image.open("photo.jpg")
    batch, _ = next(iter(NaFlexImages([("photo", lambda: jpeg)], model, max_seq_len=64)))
    del batch["names"]
    with torch.no_grad():
        want = model(batch)
    assert torch.allclose(torch.from_numpy(names["output"]), want, atol=1e-5)
    arrays = {name: tensor.numpy() for name, tensor in names["inputs"].items()}
    assert torch.allclose(torch.from_numpy(names["compiled"](arrays)[0]), want, atol=1e-5)


@EXPORTS
@pytest.mark.slow
def test_a_name_of_the_file_that_the_locale_does_not_know(tmp_path):
    file = tmp_path / "mödel ☃.pt2"
    options = ["--model", MODEL, *SMALL, "--out", file]
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "timm_naflex_fast", "export", *options],
        env={**os.environ, **ascii_only},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    torch.export.load(file)
