"""``naflex-fast export``: what is verified is written, what is wrong is not, and the page tells how
to run the file."""

import importlib
import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.support.checks import slow
from tests.support.json_page import PAGE, named
from tests.support.oracles import OLD_TORCH
from tests.support.running import ran
from timm_naflex_fast.commands.cli.export import runtimes_for
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.measure import export as work
from timm_naflex_fast.commands.measure.images import naflex_batches
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.pictures import settings_of

KWARGS = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
SMALL = ["--random-weights", "--model-kwargs", *(f"{key}={n}" for key, n in KWARGS.items())]
MODEL = "naflexvit_base_patch16_gap"
SIGLIP2 = "naflexvit_base_patch16_siglip"
EXPORTS = pytest.mark.skipif(
    OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind"
)


def export(out, *options, model=MODEL):
    return main(["export", "--out", str(out), "--model", model, *SMALL, *options])


@pytest.fixture(scope="module", params=[".onnx", slow(".pt2")])
def exported(request, tmp_path_factory):
    """A file that was written with ``--max-seq-len 64``, what was printed, and its JSON."""
    if request.param == ".onnx":
        pytest.importorskip("onnxscript")
    file = tmp_path_factory.mktemp("exported") / f"model{request.param}"
    found = file.with_suffix(".json")
    options = ["--max-seq-len", "64", "--json", str(found)]
    with redirect_stdout(StringIO()) as said, ran("matmul"):
        assert export(file, *options, model=SIGLIP2) == 0
    assert {*file.parent.iterdir()} == {file, found}
    return file, said.getvalue(), json.loads(found.read_text())


@EXPORTS
def test_a_file_is_right_in_every_runtime_and_what_was_found_is_on_the_page(exported):
    file, said, found = exported
    right = re.findall(r"^(.*?)  +\S+e-0\d +\S+e-\d\d  ✓ right$", said, re.M)
    assert right == runtimes_for(file)
    (check, *_) = found["checks"]
    own = {*found, *check, *check["differences"]} - named("Where figures come from")
    assert own == named("export") - {"null"}


def metadata_of(file):
    """What a file says of itself."""
    if file.suffix == ".pt2":
        extra = {"metadata.json": ""}
        torch.export.load(file, extra_files=extra)
        return json.loads(extra["metadata.json"])
    onnx = pytest.importorskip("onnx")
    found = onnx.load(file)
    for value in found.graph.input:
        batch, tokens, *_ = value.type.tensor_type.shape.dim
        assert (batch.dim_param, tokens.dim_param) == ("batch", "tokens")
    return {entry.key: entry.value for entry in found.metadata_props}


@EXPORTS
def test_a_file_names_its_axes_and_its_model(exported):
    file, _, found = exported
    metadata = metadata_of(file)
    assert metadata == found["metadata"]
    assert metadata["model"] == SIGLIP2
    assert metadata["patch_size"] == "[16, 16]" and metadata["max_seq_len"] == "64"
    assert len(metadata["weights_sha256"]) == 64
    for package in ("timm_naflex_fast", "timm", "torch"):
        assert metadata[package] == importlib.import_module(package).__version__


@EXPORTS
def test_the_page_leads_from_a_picture_to_the_output(exported, monkeypatch):
    file, *_ = exported
    if file.suffix != ".onnx":
        return
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    monkeypatch.chdir(file.parent)
    Image.radial_gradient("L").resize((300, 200)).convert("RGB").save("photo.jpg")
    set_float32, run, _ = re.findall(
        r"```python\n(.*?)```", PAGE.with_name("export.md").read_text(), re.S
    )
    names = {}

    exec(set_float32 + run, names)

    model, _ = load_model(SIGLIP2, random_weights=True, **KWARGS)
    jpeg = Image.open("photo.jpg")
    settings = settings_of(model) | {"max_seq_len": "64"}
    ((batch, _),) = naflex_batches([("photo", lambda: jpeg)], settings, 1, [])
    with torch.no_grad():
        want = model(batch)
    assert torch.allclose(torch.from_numpy(names["output"]), want, atol=1e-5)
    arrays = {name: tensor.numpy() for name, tensor in names["inputs"].items()}
    assert torch.allclose(torch.from_numpy(names["compiled"](arrays)[0]), want, atol=1e-5)


@EXPORTS
@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.pt2", "m.onnx"])
def test_plain_images(name, tmp_path):
    assert export(tmp_path / name, "--size", "32", "48") == 0
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.fixture
def runtime(monkeypatch):
    """A function that lets torch.export run timm's output changed; nothing is exported."""

    def write(module, example, free, file, metadata):
        file.write_text("the new one")
        return module

    def replace(change):
        def load(file, module):
            return lambda inputs: change(module(**inputs))

        monkeypatch.setattr(work, "write", write)
        monkeypatch.setitem(work.LOADERS, "torch.export", load)

    return replace


def test_a_file_that_a_runtime_gets_wrong_is_not_written(runtime, tmp_path, capsys):
    file = tmp_path / "m.pt2"
    file.write_text("the old one")
    for change in (torch.neg, lambda output: output[None], torch.Tensor.double):
        runtime(change)
        assert export(file) == 1
        assert [*tmp_path.iterdir()] == [file] and file.read_text() == "the old one"
        out = capsys.readouterr().out
        assert f"not written: {file}" in out and "  ✗ wrong\n" in out


def test_where_a_wrong_file_would_give_the_same_there_is_no_answer(runtime, tmp_path, capsys):
    runtime(lambda output: output)
    model, _ = load_model(MODEL, random_weights=True, **KWARGS)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(zeros, tmp_path / "zeros.safetensors")
    given = [f"--checkpoint={tmp_path / 'zeros.safetensors'}", *SMALL[1:]]
    assert main(["export", "--out", str(tmp_path / "m.pt2"), "--model", MODEL, *given]) == 0
    out = capsys.readouterr().out
    assert re.search(r"torch.export +- +- +no answer: every picture gives the same", out)


@pytest.mark.parametrize("name", ["m.pt2", "m.onnx"])
def test_too_little_space_is_told_before_the_work(name, runtime, tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(work, "write", None)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1e5))
    assert export(tmp_path / name) == 2
    says = r"needs 0\.4 MB of free space, twice the weights; there are 0\.1"
    assert re.search(says, capsys.readouterr().err)
    assert not [*tmp_path.iterdir()]


def test_a_size_that_the_patches_do_not_fill_is_one_line(tmp_path, capsys):
    assert export(tmp_path / "m.pt2", "--size", "33", "48") == 2
    loading, line = capsys.readouterr().err.splitlines()
    assert loading.startswith("loading ")
    assert "--size must be a multiple of the model's patches, 16 x 16" in line
    assert not [*tmp_path.iterdir()]


def test_all_that_is_missing_is_named_at_once_with_how_to_install_it(tmp_path, capsys, monkeypatch):
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    assert export(tmp_path / "m.onnx") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("an .onnx file needs onnx, onnxruntime: pip install onnx onnxruntime")
