"""``naflex-fast identify`` says in one line which convention a port followed."""

import pytest
import torch
from safetensors.torch import save_file

from timm_naflex_fast.cli import identify as command
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.identify import FAMILIES, Convention, question

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)
TABLE = torch.randn(8, 9, 3, generator=torch.Generator().manual_seed(6))


@pytest.fixture
def identify(tmp_path, capsys):
    def identify(result, *options):
        file = tmp_path / "port.safetensors"
        save_file({"table": TABLE, "sizes": torch.tensor(SIZES), "result": result.contiguous()}, file)
        code = main(["identify", str(file), *options])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1
        return code, out + err

    return identify


def made(mode="bilinear", dtype=torch.float32, **settings):
    coefficient = None if mode == "bilinear" else -0.5
    return Convention(mode, **{"cubic_coefficient": coefficient, **settings}).tokens(TABLE.double(), SIZES).to(dtype)


def test_the_command(identify):
    code, line = identify(made())
    assert code == 0 and line.startswith("bilinear with antialiasing: this is the reference")
    assert identify(made(dtype=torch.bfloat16))[0] == identify(made(dtype=torch.float16))[0] == 0
    code, line = identify(made(antialias=False))
    assert code == 1 and line.startswith(
        "bilinear without antialiasing; the reference is bilinear with antialiasing: embeddings differ by "
    )
    assert (
        identify(made("bicubic", align_corners=True, half_pixel=False), "--mode", "bicubic", "--align-corners")[0] == 0
    )
    code, line = identify(made(merge=2, transposed="order", antialias=False, dtype=torch.bfloat16), "--merge", "2")
    assert code == 1 and "column by column, tokens in 2 x 2 blocks; the reference is bilinear with" in line
    code, line = identify(made(bfloat16="table"))
    assert code == 1 and "table rounded to bfloat16; the reference" in line


def test_the_command_on_noise_and_on_wrong_files(identify, tmp_path, capsys):
    code, line = identify(torch.randn(144, 3, generator=torch.Generator().manual_seed(9)))
    assert code == 1 and line.startswith("no known convention; the nearest is ")
    assert identify(torch.zeros(7, 3)) == (
        2,
        "naflex-fast identify: result must have 144 tokens of 3 channels; got shape (7, 3)\n",
    )
    code, line = identify(made(), "--merge", "5")
    assert code == 2 and "--merge 5" in line
    save_file({"table": TABLE}, tmp_path / "part.safetensors")
    (tmp_path / "no.safetensors").write_text("no safetensors")
    for name, words in (("part", "lacks sizes, result"), ("no", "is not a safetensors file"), ("none", "No such file")):
        assert main(["identify", str(tmp_path / f"{name}.safetensors")]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_sizes_that_cannot_tell_are_said_to(tmp_path, capsys):
    """On a table made larger, antialiasing changes nothing."""
    file, sizes = str(tmp_path / "large.safetensors"), [(1, 16, 18)]
    result = Convention("bilinear", cubic_coefficient=None).tokens(TABLE.double(), sizes).float()
    save_file({"table": TABLE, "sizes": torch.tensor(sizes), "result": result}, file)
    assert main(["identify", file]) == 0
    out = capsys.readouterr().out
    assert "this is the reference" in out and "; on these sizes 3 other conventions give the same" in out


def test_the_family_may_be_named_and_its_question_written(tmp_path, capsys):
    assert command.FAMILIES.split(", ") == list(FAMILIES)
    file = str(tmp_path / "new.safetensors")
    assert main(["identify", "--family", "qwen3-vl", "--write", file]) == 0
    assert capsys.readouterr().out.endswith("table (48, 48, 8), sizes [[12, 20], [30, 8], [4, 18]]\n")
    assert main(["identify", "--family", "qwen3-vl", file]) == 2
    assert "lacks result" in capsys.readouterr().err
    for nowhere in (str(tmp_path), str(tmp_path / "none" / "new.safetensors")):
        assert main(["identify", "--write", nowhere]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["identify", "--family", "clip", file]) == 2
    assert "family='clip' is not known; valid: siglip2, lfm2-vl" in capsys.readouterr().err
    sizes = [(1, h, w) for h, w in question("qwen3-vl")["sizes"].tolist()]
    port = Convention("bilinear", cubic_coefficient=None, merge=2)
    result = port.tokens(question("qwen3-vl")["table"].double(), sizes)
    save_file({"result": result.float()}, file)
    assert main(["identify", "--family", "qwen3-vl", file]) == 1
    assert "the reference is bilinear without antialiasing, aligned corners, tokens in 2 x 2" in capsys.readouterr().out
