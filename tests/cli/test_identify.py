"""``naflex-fast identify`` says in one line which convention a port followed.

With ``--family``, that of its library's own code.
"""

import re
from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checks import one_by_one, slow
from tests.support.oracles import relative
from timm_naflex_fast.cli import identify as command
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.identify import FAMILIES, Convention, example_inputs

# (t, h, w): in blocks of one token alone, so few conventions are tried
SIZES = [(1, 5, 7), (2, 9, 3)]
CHANNELS = 8
TABLE = torch.randn(8, 9, 3, generator=torch.Generator().manual_seed(6))
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
        lines = [*out.splitlines(), *err.splitlines()]
        (line,) = [line for line in lines if not line.startswith("comparing ")]
        return code, line

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
            "bicubic with antialiasing, aligned corners; the reference is bilinear with "
            "antialiasing: ",
        ),
        (
            BLOCKS,
            "--family qwen3-vl",
            1,
            "column by column, tokens in 2 x 2 blocks; the reference is bilinear without",
        ),
        ({"bfloat16": "table"}, "", 1, "table rounded to bfloat16; the reference"),
        # Where the table grows, zeros or border decide nothing.
        ({"sizes": [(1, 17, 19)]}, "", 0, "; on these sizes 1 other conventions give the same"),
    ],
)
def test_a_port_is_named(made, options, status, words, identify):
    code, line = identify(port(**made), *options.split())
    assert code == status and words in line


def test_noise_follows_no_known_convention(identify):
    noise = torch.randn(89, 3, generator=torch.Generator().manual_seed(9))
    code, line = identify({**port(), "result": noise})
    assert code == 1
    assert re.match(r"no known convention; the nearest is .* \d+ % away; the reference is ", line)


def test_what_cannot_be_compared_is_one_line(identify):
    code, line = identify({**port(), "result": torch.zeros(7, 3)})
    assert code == 2
    assert line == (
        "naflex-fast identify: result must have 89 tokens of 3 channels; got shape (7, 3)"
    )
    code, line = identify(port(), "--family", "ovis2.5")
    assert code == 2 and "sizes must be multiples of 2" in line


def test_every_family_may_be_named():
    assert command.FAMILIES == tuple(FAMILIES)


def test_a_familys_question_is_written_the_same_everywhere(identify, tmp_path, capsys):
    new = tmp_path / "port.safetensors"
    assert main(["identify", str(new), "--family", "qwen3-vl", "--write"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{new}: table (48, 48, 8), sizes [[12, 20], [30, 8], [4, 18]]\nNext: ")
    assert "`result` (552, 8)" in out
    numbers = example_inputs("siglip2")["table"][0, 0, :3].tolist()
    assert numbers == pytest.approx([0.68884, 0.51591, -0.15885], abs=1e-5)

    written = new.read_bytes()
    assert "lacks result" in identify(None, "--family", "qwen3-vl")[1]
    code, line = identify(None, "--write")
    assert code == 2 and "File exists" in line and new.read_bytes() == written


def asked(family):
    """The family's table (H0, W0, C), its sizes [(h, w), ...], and what its convention makes of
    them."""
    inputs = example_inputs(family)
    table = inputs["table"]
    sizes = [tuple(size) for size in inputs["sizes"].tolist()]
    frames = [(1, h, w) for h, w in sizes]
    return table, sizes, FAMILIES[family].convention.tokens(table.double(), frames)


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
    assert isinstance(vision, modeling("siglip2").Siglip2VisionConfig)
    assert vision.num_patches == len(table) ** 2
    return siglip2(table, sizes)


def moonvit(table, sizes):
    config = modeling("kimi_k25").Kimi_K25VisionConfig(hidden_size=CHANNELS)
    assert config.pos_emb_height == config.pos_emb_width == len(table)
    embeddings = modeling("kimi_k25").Kimi_K25VisionPositionEmbeddings(config)
    fill(embeddings.position_embeddings, table)
    tokens = torch.zeros(sum(h * w for h, w in sizes), CHANNELS)
    return embeddings(tokens, torch.tensor([(1, h, w) for h, w in sizes]))


def qwen3_vl(table, sizes):
    small = dict(depth=0, hidden_size=CHANNELS, num_heads=2, intermediate_size=8, out_hidden_size=8)
    config = modeling("qwen3_vl").Qwen3VLVisionConfig(**small, deepstack_visual_indexes=[])
    assert config.num_position_embeddings == len(table) ** 2
    model = modeling("qwen3_vl").Qwen3VLVisionModel(config).eval()
    fill(model.pos_embed.weight, table)
    # What leaves the patch embedding is zero, so the first to read the sum reads the position
    # embeddings.
    seen = []
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
    resize = embeddings._interpolate_position_embedding
    return torch.cat([resize(size, torch.float32)[0] for size in sizes])


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
    assert code == 0 and "this is the reference" in line
    # Where RADIO's table of 128 x 128 shrinks, no position lies outside of it: zeros or border
    # there, nobody can tell.
    assert ("other conventions" in line) == (family == "radio")


@pytest.mark.parametrize(
    ("family", "port", "found", "reference"),
    [  # openvino.genai pull request 4444 and llama.cpp before 17577; llama.cpp before 25781
        (
            "lfm2-vl",
            dict(antialias=False),
            "bilinear without antialiasing",
            "bilinear with antialiasing",
        ),
        (
            "qwen3-vl",
            dict(merge=2),
            "bilinear with antialiasing, tokens in 2 x 2 blocks",
            "bilinear without antialiasing, aligned corners, tokens in 2 x 2 blocks",
        ),
    ],
)
def test_ports_that_erred_are_named(family, port, found, reference, identify):
    table, sizes, _ = asked(family)
    result = torch.cat(one_by_one(table, sizes, mode="bilinear", **port))
    code, line = identify({"result": result.float()}, "--family", family)
    words = f"{found}; the reference is {reference}: embeddings differ by "
    assert code == 1 and line.startswith(words)
    assert float(line.removeprefix(words).split(" %")[0]) > 10
