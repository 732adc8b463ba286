"""``naflex-fast export``: what is verified is written, what is wrong is not, and what is printed
runs the file."""

import re

import pytest
import torch

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH
from tests.support.running import ran
from timm_naflex_fast.cli.export import RUNTIMES
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.measure import export as work

SMALL = "--random-weights --model-kwargs embed_dim=32 depth=1 num_heads=2 num_classes=5".split()
NAFLEX = []
PLAIN = ["--size", "32", "48"]
INPUTS = {
    "patches": torch.ones(2, 12, 768),
    "patch_coord": torch.ones(2, 12, 2, dtype=torch.int64),
    "patch_valid": torch.ones(2, 12, dtype=torch.bool),
    "image": torch.ones(2, 3, 32, 48),
}
EXPORTS = pytest.mark.skipif(
    OLD_TORCH, reason="this torch's export has no dynamic shapes of this kind"
)


def export(out, *options):
    return main(
        ["export", "--model", "naflexvit_base_patch16_gap", *SMALL, "--out", str(out), *options]
    )


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
    assert re.findall(r"^(.*?) +\S+e-0\d +\S+e-\d\d  right$", out, re.M) == [*RUNTIMES[suffix]]
    assert "dtypes: bool, float32, int64\n" in out if not options else "float64" not in out
    names = dict(INPUTS)
    if suffix == ".onnx":
        names = {name: tensor.numpy() for name, tensor in names.items()}
    exec(out[out.index("import ") :], names)
    assert names["output"].shape == (2, 5)


@EXPORTS
@pytest.mark.parametrize("factor", [0.5, slow(torch.nan)])
def test_a_file_that_a_runtime_gets_wrong_is_not_written(factor, tmp_path, capsys, monkeypatch):
    def load(file, program):
        def wrong(inputs):
            output = program.module()(**inputs)
            return factor * output if len(output) == 1 else output

        return wrong

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
