"""``naflex-fast identify`` says in one line which convention a port followed.

With ``--family``, that of its library's own code.
"""

from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checks import one_by_one, slow
from tests.support.oracles import relative
from timm_naflex_fast.cli import identify as command
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.identify import FAMILIES, Convention, example_inputs

SIZES = [
    (1, 5, 7),
    (2, 9, 3),
]  # (t, h, w): in blocks of one token alone, so few conventions are tried
CHANNELS, TABLE = 8, torch.randn(8, 9, 3, generator=torch.Generator().manual_seed(6))
EQUAL = "bilinear with antialiasing: this is the reference (largest difference "
CORNERS = dict(mode="bicubic", cubic_coefficient=-0.5, align_corners=True, half_pixel=False)
BLOCKS = dict(merge=2, transposed="order", antialias=False, dtype=torch.bfloat16, sizes=[(1, 4, 6)])


@pytest.fixture
def identify(tmp_path, capsys):
    """The command's exit status and its line, about a file of these tensors (or a text)."""

    def identify(contents, *options):
        file = tmp_path / "port.safetensors"
        if isinstance(contents, dict):
            save_file(contents, file)
        elif contents is not None:
            file.write_text(contents)
        code = main(["identify", str(file), *options])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1
        return code, out + err

    return identify


def port(dtype=torch.float32, sizes=SIZES, **settings):
    """What a port computed that errs in these settings, beside its table and sizes."""
    convention = Convention(**{"mode": "bilinear", "cubic_coefficient": None, **settings})
    result = convention.tokens(TABLE.double(), sizes).to(dtype)
    return {"table": TABLE, "sizes": torch.tensor(sizes), "result": result.contiguous()}


@pytest.mark.parametrize(
    ("made", "options", "status", "words"),
    [
        ({}, "", 0, EQUAL),
        ({"dtype": torch.bfloat16}, "", 0, EQUAL),
        ({"dtype": torch.float16}, "", 0, EQUAL),
        (
            {"antialias": False},
            "",
            1,
            "bilinear without antialiasing; the reference is bilinear with antialiasing: ",
        ),
        (
            CORNERS,
            "",
            1,
            "bicubic with antialiasing, aligned corners; the reference is bilinear with antialiasing: ",
        ),
        (
            BLOCKS,
            "--family qwen3-vl",
            1,
            "column by column, tokens in 2 x 2 blocks; the reference is bilinear without",
        ),
        ({"bfloat16": "table"}, "", 1, "table rounded to bfloat16; the reference"),
        (
            {"sizes": [(1, 17, 19)]},
            "",
            0,
            "; on these sizes 1 other conventions give the same",
        ),  # the table grew
    ],
)
def test_the_command(made, options, status, words, identify):
    code, line = identify(port(**made), *options.split())
    assert code == status and words in line and "random table" not in line


def test_the_command_on_noise_and_on_wrong_files(identify):
    noise = torch.randn(89, 3, generator=torch.Generator().manual_seed(9))
    code, line = identify({**port(), "result": noise})
    assert code == 1 and line.startswith("no known convention; the nearest is ")
    wrong = "naflex-fast identify: result must have 89 tokens of 3 channels; got shape (7, 3)\n"
    assert identify({**port(), "result": torch.zeros(7, 3)}) == (2, wrong)
    for contents, options, words in (
        (port(), ["--family", "ovis2.5"], "sizes must be multiples of 2"),
        ({"table": TABLE}, [], "lacks sizes, result"),
        ("no safetensors", [], "is not a safetensors file"),
        (None, ["--family", "clip"], "family='clip' is not known; valid: siglip2, lfm2-vl"),
    ):
        code, line = identify(contents, *options)
        assert code == 2 and words in line


def test_the_family_may_be_named_and_its_question_written_the_same_everywhere(
    identify, tmp_path, capsys
):
    assert command.KNOWN.split(", ") == list(FAMILIES)
    family = ["--family", "qwen3-vl"]
    code, line = identify(None, *family)
    assert code == 2 and "No such file" in line
    new = tmp_path / "port.safetensors"
    assert main(["identify", str(new), *family, "--write"]) == 0
    out, written = capsys.readouterr().out, new.read_bytes()
    assert (
        "table (48, 48, 8), sizes [[12, 20], [30, 8], [4, 18]]\nNext: " in out
        and "`result` (552, 8)" in out
    )
    assert "lacks result" in identify(None, *family)[1]
    code, line = identify(None, "--write")
    assert code == 2 and "File exists" in line and new.read_bytes() == written
    numbers = example_inputs("siglip2")["table"][0, 0, :3].tolist()
    assert numbers == pytest.approx([0.68884, 0.51591, -0.15885], abs=1e-5)
    for nowhere in (str(tmp_path), str(tmp_path / "none" / "new.safetensors")):
        assert (
            main(["identify", "--write", nowhere]) == 2 and capsys.readouterr().err.count("\n") == 1
        )


def asked(family):
    """The family's table (H0, W0, C), its sizes [(h, w), ...], and what its convention makes of
    them."""
    table, sizes = (
        example_inputs(family)["table"],
        [tuple(size) for size in example_inputs(family)["sizes"].tolist()],
    )
    return (
        table,
        sizes,
        FAMILIES[family].convention.tokens(table.double(), [(1, *size) for size in sizes]),
    )


def fill(parameter, table):
    with torch.no_grad():
        parameter.copy_(table.reshape(parameter.shape))


def modeling(name):
    return import_module(f"transformers.models.{name}.modeling_{name}")


def siglip2(table, sizes):
    resize = modeling("siglip2").Siglip2VisionEmbeddings.resize_positional_embeddings
    padded = resize(table, torch.tensor(sizes), max_length=240)
    return torch.cat([image[: h * w] for image, (h, w) in zip(padded, sizes)])


def lfm2_vl(table, sizes):
    vision = modeling("lfm2_vl").Lfm2VlConfig().vision_config
    assert (
        isinstance(vision, modeling("siglip2").Siglip2VisionConfig)
        and vision.num_patches == len(table) ** 2
    )
    return siglip2(table, sizes)


def moonvit(table, sizes):
    config = modeling("kimi_k25").Kimi_K25VisionConfig(hidden_size=CHANNELS)
    assert config.pos_emb_height == config.pos_emb_width == len(table)
    embeddings = modeling("kimi_k25").Kimi_K25VisionPositionEmbeddings(config)
    fill(embeddings.position_embeddings, table)
    return embeddings(
        torch.zeros(sum(h * w for h, w in sizes), CHANNELS), torch.tensor([(1, *s) for s in sizes])
    )


def qwen3_vl(table, sizes):
    small = dict(depth=0, hidden_size=CHANNELS, num_heads=2, intermediate_size=8, out_hidden_size=8)
    config = modeling("qwen3_vl").Qwen3VLVisionConfig(**small, deepstack_visual_indexes=[])
    assert config.num_position_embeddings == len(table) ** 2
    model = modeling("qwen3_vl").Qwen3VLVisionModel(config).eval()
    fill(model.pos_embed.weight, table)
    seen = []  # what leaves the patch embedding is zero, so the first to read the sum reads the position embeddings
    model.patch_embed.forward = lambda pixels: torch.zeros(len(pixels), CHANNELS)
    model.rotary_pos_emb.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    grids = torch.tensor([(1, *size) for size in sizes])
    model(torch.zeros(sum(h * w for h, w in sizes), 1), grid_thw=grids)
    return seen[0]


def radio(table, sizes):
    config = modeling("radio").RadioConfig(hidden_size=CHANNELS)
    assert config.max_img_size // config.patch_size == len(table)
    embeddings = modeling("radio").RadioPatchEmbeddings(config)
    fill(embeddings.position_embedding, table)
    return torch.cat(
        [embeddings._interpolate_position_embedding(size, torch.float32)[0] for size in sizes]
    )


def ovis(table, sizes):
    """vLLM, models/siglip2navit.py (transformers has no Ovis2.5)."""
    return torch.cat(one_by_one(table, sizes, mode="bicubic", antialias=False, merge=2))


ORIGINALS = dict(zip(FAMILIES, (siglip2, lfm2_vl, moonvit, qwen3_vl, ovis, radio), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_convention_is_that_of_the_original_library(family):
    if family != "ovis2.5":
        pytest.importorskip("transformers", minversion="5.23")
    table, sizes, got = asked(family)
    with torch.no_grad():
        want = ORIGINALS[family](table, sizes)
    assert relative(got, want.double()) <= 2**-22 * len(table)  # PyTorch's positions are float32


@pytest.mark.parametrize("family", [name if name == "siglip2" else slow(name) for name in FAMILIES])
def test_a_right_port_is_said_to_be_equal(family, identify):
    code, line = identify({"result": asked(family)[2].float()}, "--family", family)
    # Where RADIO's table of 128 x 128 shrinks, no position lies outside of it: zeros or border
    # there, nobody can tell.
    assert (
        code == 0
        and "this is the reference" in line
        and ("other conventions" in line) == (family == "radio")
    )


@pytest.mark.parametrize(
    "family, port, found, reference",
    [  # openvino.genai pull request 4444 and llama.cpp before 17577; llama.cpp before 25781
        ("lfm2-vl", dict(antialias=False), "without antialiasing", "with antialiasing"),
        ("qwen3-vl", dict(merge=2), "with antialiasing", "without antialiasing, aligned corners"),
    ],
)
def test_ports_that_erred_are_named(family, port, found, reference, identify):
    blocks = ", tokens in 2 x 2 blocks" if "merge" in port else ""
    words = f"bilinear {found}{blocks}; the reference is bilinear {reference}{blocks}: embeddings differ by "
    result = torch.cat(one_by_one(*asked(family)[:2], mode="bilinear", **port))
    code, line = identify({"result": result.float()}, "--family", family)
    assert (
        code == 1 and line.startswith(words) and float(line.removeprefix(words).split(" %")[0]) > 10
    )
    assert "of this random table; a trained table is smoother, and differs less" in line
