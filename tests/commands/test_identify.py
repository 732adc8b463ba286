"""Every convention is told from every other one, and the command says which it is."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from timm_naflex_fast.cli.main import main
from timm_naflex_fast.functional import identify_resampling
from timm_naflex_fast.resampling.identify import Convention, conventions

SIZES = [(1, 4, 6), (1, 12, 8), (2, 6, 2)]  # (t, h, w)


def random_table(seed, channels=3, size=(8, 9)):
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("n0", [1, 4, 9])
def test_the_formula_is_pytorchs(n0, corners, mode, antialias):
    coefficient = None if mode == "bilinear" else -0.5 if antialias else -0.75
    convention = Convention(mode, antialias, corners, not corners, cubic_coefficient=coefficient)
    table = random_table(0, size=(n0, n0 + 1)).double()
    for h, w in [(1, 2), (3, 17), (8, 5), (n0, n0 + 1)]:
        theirs = F.interpolate(
            table.permute(2, 0, 1)[None].contiguous(),
            size=(h, w),
            mode=mode,
            antialias=antialias,
            align_corners=corners,
        )
        torch.testing.assert_close(convention.grid(table, h, w), theirs[0].permute(1, 2, 0), atol=1e-6, rtol=1e-6)


def test_no_two_conventions_give_the_same_result():
    for seed in range(2):
        table = random_table(seed).double()
        results = torch.stack([c.tokens(table, SIZES).flatten() for c in conventions(SIZES)])
        assert len(results) == 864
        distance = torch.cdist(results, results, p=float("inf")).fill_diagonal_(torch.inf) / table.abs().max()
        assert distance.min() > 1e-4


ALL = list(conventions(SIZES))


@pytest.mark.parametrize("convention", [*ALL[:36:5], *ALL[36::41]], ids=str)
def test_each_is_identified_from_float32(convention):
    table = random_table(3)
    result = convention.tokens(table.double(), SIZES).float()
    (error, best), (second, _), *_ = identify_resampling(table[None], torch.tensor(SIZES), result)
    assert Convention(**best) == convention and error < 1e-6 and second > 1e-4


def test_on_grids_that_cannot_tell_the_plainest_comes_first():
    table = random_table(4)
    result = Convention("bilinear", antialias=False, cubic_coefficient=None).tokens(table.double(), [(1, 16, 16)])
    (error, best), (same, _), *_ = identify_resampling(table, (16, 16), result.view(1, 16, 16, -1))
    assert best["antialias"] and best["transposed"] is None and error < 1e-12 and same < 1e-12


def test_bad_input_is_named():
    table = random_table(5)
    for wrong, size, result in (
        (table[0], (4, 4), torch.zeros(16, 3)),
        (table, (4, 0), torch.zeros(16, 3)),
        (table, [[1, 1, 2, 3]], torch.zeros(6, 3)),
        (table, 4, torch.zeros(16, 3)),
        (table, (4.0, 4.0), torch.zeros(16, 3)),
        (table, (4, 4), torch.zeros(15, 3)),
        (table, (4, 4), torch.full((16, 3), torch.nan)),
    ):
        with pytest.raises(ValueError, match=r"must (be|have|hold)"):
            identify_resampling(wrong, size, result)


@pytest.fixture
def identify(tmp_path, capsys):
    def identify(result, *options, table=None, **tensors):
        file = tmp_path / "port.safetensors"
        table = random_table(6) if table is None else table
        save_file({"table": table, "sizes": torch.tensor(SIZES), "result": result.contiguous(), **tensors}, file)
        code = main(["identify", str(file), *options])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1
        return code, out + err

    return identify


def made(mode="bilinear", dtype=torch.float32, **settings):
    coefficient = None if mode == "bilinear" else -0.5
    return (
        Convention(mode, **{"cubic_coefficient": coefficient, **settings})
        .tokens(random_table(6).double(), SIZES)
        .to(dtype)
    )


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
    save_file({"table": random_table(6)}, tmp_path / "part.safetensors")
    (tmp_path / "no.safetensors").write_text("no safetensors")
    for name, words in (("part", "lacks sizes, result"), ("no", "is not a safetensors file"), ("none", "No such file")):
        assert main(["identify", str(tmp_path / f"{name}.safetensors")]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
