"""``naflex-fast export``: what is verified is written, what is wrong is not, and what is printed
runs the file."""

import re

import pytest
import torch

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH
from tests.support.running import ran
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.measure import export as work

SMALL = "--random-weights --model-kwargs embed_dim=32 depth=1 num_heads=2 num_classes=5".split()
EXPORTS = pytest.mark.skipif(
    OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind"
)
PLAIN = ["--size", "32", "48"]


def export(out, *options, model="naflexvit_base_patch16_gap"):
    with ran("matmul"):
        return main(["export", "--model", model, *SMALL, "--out", str(out), *options])


@EXPORTS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.pt2", []),
        *(slow(*case) for case in (("m.pt2", PLAIN), ("m.onnx", []), ("m.onnx", PLAIN))),
    ],
)
def test_the_printed_lines_run_the_file(name, options, tmp_path, capsys):
    assert export(tmp_path / name, *options) == 0 and [
        file.name for file in tmp_path.iterdir()
    ] == [name]
    out = capsys.readouterr().out
    runtimes = ["torch.export"] + ["ONNX Runtime", "OpenVINO"] * name.endswith(".onnx")
    assert re.findall(r"^(.*?) +\S+e-0\d  right$", out, re.M) == runtimes
    shapes = dict(re.findall(r"^  (\w+): (\(.*)$", out, re.M))
    given = dict(batch=2, length=12, float32=torch.float32, int64=torch.int64, bool=torch.bool)
    for input_name, shape in shapes.items():
        *sizes, dtype = re.findall(r"\w+", shape)
        tensor = torch.ones([given.get(n) or int(n) for n in sizes], dtype=given[dtype])
        given[input_name] = tensor.numpy() if name.endswith(".onnx") else tensor
    exec(out[out.index("import ") :], given)
    assert given["output"].shape == (2, 5)


@EXPORTS
def test_a_file_that_a_runtime_gets_wrong_is_not_written(tmp_path, capsys, monkeypatch):
    half = lambda file, program: lambda inputs: 0.5 * program.module()(**inputs)
    monkeypatch.setitem(work.LOADERS, "torch.export", half)
    out = tmp_path / "m.pt2"
    out.write_text("the old one")
    assert export(out) == 1 and [file.read_text() for file in tmp_path.iterdir()] == ["the old one"]
    assert (
        re.search(r"^torch\.export .*wrong$", (text := capsys.readouterr().out), re.M)
        and "not written" in text
    )
