"""``naflex-fast identify`` says in one line which convention a port followed."""

import pytest
import torch

from timm_naflex_fast.cli import identify as command
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.identify import FAMILIES, Convention

SIZES = [(1, 5, 7), (2, 9, 3)]  # (t, h, w): in blocks of one token alone, so few conventions are tried
TABLE = torch.randn(8, 9, 3, generator=torch.Generator().manual_seed(6))
BILINEAR = Convention("bilinear", cubic_coefficient=None)


def port(dtype=torch.float32, sizes=SIZES, **settings):
    """What a port computed that errs in these settings, beside its table and sizes."""
    convention = Convention(**{**vars(BILINEAR), **settings})
    result = convention.tokens(TABLE.double(), sizes).to(dtype)
    return {"table": TABLE, "sizes": torch.tensor(sizes), "result": result.contiguous()}


EQUAL = "bilinear with antialiasing: this is the reference (largest difference "
CORNERS = dict(mode="bicubic", cubic_coefficient=-0.5, align_corners=True, half_pixel=False)
BLOCKS = dict(merge=2, transposed="order", antialias=False, dtype=torch.bfloat16, sizes=[(1, 4, 6)])


@pytest.mark.parametrize(
    ("made", "options", "status", "words"),
    [
        ({}, "", 0, EQUAL),
        ({"dtype": torch.bfloat16}, "", 0, EQUAL),
        ({"dtype": torch.float16}, "", 0, EQUAL),
        ({"antialias": False}, "", 1, "bilinear without antialiasing; the reference is bilinear with antialiasing: "),
        (CORNERS, "--mode bicubic --align-corners", 0, "bicubic with antialiasing, aligned corners: this is the ref"),
        (BLOCKS, "--merge 2", 1, "column by column, tokens in 2 x 2 blocks; the reference is bilinear with"),
        ({"bfloat16": "table"}, "", 1, "table rounded to bfloat16; the reference"),
        ({"sizes": [(1, 17, 19)]}, "", 0, "; on these sizes 1 other conventions give the same"),  # the table grew
    ],
)
def test_the_command(made, options, status, words, identify):
    code, line = identify(port(**made), *options.split())
    assert code == status and words in line


def test_the_command_on_noise_and_on_wrong_files(identify):
    noise = torch.randn(89, 3, generator=torch.Generator().manual_seed(9))
    code, line = identify({**port(), "result": noise})
    assert code == 1 and line.startswith("no known convention; the nearest is ")
    wrong = "naflex-fast identify: result must have 89 tokens of 3 channels; got shape (7, 3)\n"
    assert identify({**port(), "result": torch.zeros(7, 3)}) == (2, wrong)
    for contents, options, words in (
        (port(), ["--merge", "5"], "--merge 5"),
        ({"table": TABLE}, [], "lacks sizes, result"),
        ("no safetensors", [], "is not a safetensors file"),
        (None, ["--family", "clip"], "family='clip' is not known; valid: siglip2, lfm2-vl"),
    ):
        code, line = identify(contents, *options)
        assert code == 2 and words in line


def test_the_family_may_be_named_and_its_question_written(identify, tmp_path, capsys):
    assert command.FAMILIES.split(", ") == list(FAMILIES)
    family = ["--family", "qwen3-vl"]
    code, line = identify(None, *family)
    assert code == 2 and "No such file" in line
    assert identify(None, *family, "--write")[1].endswith("table (48, 48, 8), sizes [[12, 20], [30, 8], [4, 18]]\n")
    assert "lacks result" in identify(None, *family)[1]
    for nowhere in (str(tmp_path), str(tmp_path / "none" / "new.safetensors")):
        assert main(["identify", "--write", nowhere]) == 2
        assert capsys.readouterr().err.count("\n") == 1
