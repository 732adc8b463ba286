"""``identify --family``: each family's convention is its library's own code, and ports that erred are named.

The ports are restated here in words of our own, as far as their sources say what they did.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.oracles import relative
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.identify import FAMILIES, question

CHANNELS = 8


def asked(family):
    """The family's table (H0, W0, C) and sizes [(h, w), ...]."""
    found = question(family)
    return found["table"], [tuple(size) for size in found["sizes"].tolist()]


def fill(parameter, table):
    with torch.no_grad():
        parameter.copy_(table.reshape(parameter.shape))


# What the original libraries compute.


def siglip2(table, sizes):
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings as Embeddings

    longest = max(h * w for h, w in sizes)
    padded = Embeddings.resize_positional_embeddings(table, torch.tensor(sizes), max_length=longest)
    return torch.cat([image[: h * w] for image, (h, w) in zip(padded, sizes)])


def lfm2_vl(table, sizes):
    """Its tower is Siglip2's."""
    from transformers import Lfm2VlConfig, Siglip2VisionConfig

    assert isinstance(Lfm2VlConfig().vision_config, Siglip2VisionConfig)
    assert Lfm2VlConfig().vision_config.num_patches == len(table) ** 2
    return siglip2(table, sizes)


def moonvit(table, sizes):
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionPositionEmbeddings

    assert Kimi_K25VisionConfig().pos_emb_height == Kimi_K25VisionConfig().pos_emb_width == len(table)
    embeddings = Kimi_K25VisionPositionEmbeddings(Kimi_K25VisionConfig(hidden_size=CHANNELS))
    fill(embeddings.position_embeddings, table)
    return embeddings(torch.zeros(sum(h * w for h, w in sizes), CHANNELS), torch.tensor([(1, *s) for s in sizes]))


def qwen3_vl(table, sizes):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    assert Qwen3VLVisionConfig().num_position_embeddings == len(table) ** 2
    small = dict(depth=0, hidden_size=CHANNELS, num_heads=2, intermediate_size=8, out_hidden_size=8)
    model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**small, deepstack_visual_indexes=[])).eval()
    fill(model.pos_embed.weight, table)
    seen = []  # what leaves the patch embedding is zero, so the first to read the sum reads the position embeddings
    model.patch_embed.forward = lambda pixels: torch.zeros(len(pixels), CHANNELS)
    model.rotary_pos_emb.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    grids = torch.tensor([(1, *size) for size in sizes])
    model(torch.zeros(sum(h * w for h, w in sizes), 1), grid_thw=grids)
    return seen[0]


def radio(table, sizes):
    from transformers.models.radio.configuration_radio import RadioConfig
    from transformers.models.radio.modeling_radio import RadioPatchEmbeddings

    config = RadioConfig(hidden_size=CHANNELS)
    assert config.max_img_size // config.patch_size == len(table)
    embeddings = RadioPatchEmbeddings(config)
    fill(embeddings.position_embedding, table)
    return torch.cat([embeddings._interpolate_position_embedding(size, torch.float32)[0] for size in sizes])


def ovis(table, sizes, stride=2):
    """vLLM, models/siglip2navit.py (transformers has no Ovis2.5)."""
    found = []
    for h, w in sizes:
        grid = F.interpolate(table.permute(2, 0, 1)[None], size=(h, w), mode="bicubic", align_corners=False)[0]
        for y in range(0, h, stride):
            for x in range(0, w, stride):
                found.append(grid[:, y : y + stride, x : x + stride].flatten(1).T)
    return torch.cat(found)


ORIGINALS = {
    "siglip2": siglip2,
    "lfm2-vl": lfm2_vl,
    "moonvit": moonvit,
    "qwen3-vl": qwen3_vl,
    "ovis2.5": ovis,
    "radio": radio,
}


@pytest.fixture
def identify(tmp_path, capsys):
    """Write a family's question, let a port answer it, and give back the command's exit status and line."""

    def identify(family, port):
        file = str(tmp_path / "port.safetensors")
        assert main(["identify", "--family", family, "--write", file]) == 0
        tensors = load_file(file)
        with torch.no_grad():
            result = port(tensors["table"], [tuple(size) for size in tensors["sizes"].tolist()])
        save_file({"result": result.contiguous()}, file)
        capsys.readouterr()
        code = main(["identify", "--family", family, file])
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1
        return code, out + err

    return identify


@pytest.mark.parametrize("family", FAMILIES)
def test_each_convention_is_that_of_the_original_library(family):
    if family != "ovis2.5":
        pytest.importorskip("transformers", minversion="5.23")
    table, sizes = asked(family)
    with torch.no_grad():
        want = ORIGINALS[family](table, sizes)
    got = FAMILIES[family].convention.tokens(table.double(), [(1, *size) for size in sizes])
    assert relative(got, want.double()) <= 2**-22 * len(table)  # PyTorch's positions are float32


def test_the_question_is_the_same_everywhere():
    table, sizes = asked("siglip2")
    assert table.shape == (16, 16, CHANNELS) and sizes == [(12, 20), (30, 8), (4, 18)]
    assert table.flatten()[:3].tolist() == pytest.approx([0.68884, 0.51591, -0.15885], abs=1e-5)
    assert {family: len(asked(family)[0]) for family in FAMILIES} == {
        family: known.side for family, known in FAMILIES.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_port_is_said_to_be_equal(family, identify):
    tokens = FAMILIES[family].convention.tokens
    code, line = identify(family, lambda table, sizes: tokens(table.double(), [(1, *s) for s in sizes]).float())
    assert code == 0 and "this is the reference" in line and "other conventions" not in line


# Ports that erred.


def linear(distance):
    return max(0.0, 1 - abs(distance))


def cubic(distance, a=-0.75):
    d = abs(distance)
    return (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else 0.0


def axis(length, side, weight, reach, stretch=1.0, drop=False):
    """The weights of one axis, tap by tap: half-pixel centres; taps outside are moved to the border, or dropped."""
    matrix = torch.zeros(length, side, dtype=torch.float64)
    for cell in range(length):
        centre = (cell + 0.5) * side / length - 0.5
        for tap in range(math.ceil(centre - reach * stretch), math.floor(centre + reach * stretch) + 1):
            if not drop:
                matrix[cell, min(max(tap, 0), side - 1)] += weight((tap - centre) / stretch)
            elif 0 <= tap < side:
                matrix[cell, tap] += weight((tap - centre) / stretch)
    return matrix / matrix.sum(1, keepdim=True)


def resize(table, size, **options):
    rows, columns = (axis(n, side, **options) for n, side in zip(size, table.shape))
    return torch.einsum("ab,bcd,ec->aed", rows, table.double(), columns).float()


def row_major(table, sizes, **options):
    return torch.cat([resize(table, size, **options).flatten(0, 1) for size in sizes])


def mlx_vlm_phi4_siglip(table, sizes):
    """mlx-vlm 0.7.10, models/phi4_siglip/vision.py line 87, with models/kernels.py: bicubic, taps outside dropped."""
    return row_major(table, sizes, weight=cubic, reach=2, drop=True)


def plain_bilinear(table, sizes):
    """openvino.genai pull request 4444 (lfm2_vl/classes.cpp, as reviewed); llama.cpp before pull request 17577."""
    return row_major(table, sizes, weight=linear, reach=1)


def antialiased_bilinear(table, size):
    """A triangle as wide as the table shrinks."""
    rows, columns = (
        axis(n, side, weight=linear, reach=1, stretch=max(side / n, 1), drop=True) for n, side in zip(size, table.shape)
    )
    return torch.einsum("ab,bcd,ec->aed", rows, table.double(), columns).float()


def llama_cpp_qwen3_vl(table, sizes):
    """llama.cpp before pull request 25781: half-pixel centres and antialiasing where Qwen3-VL aligns the corners."""
    found = []
    for h, w in sizes:
        grid = antialiased_bilinear(table, (h, w))
        found += [grid[y : y + 2, x : x + 2].flatten(0, 1) for y in range(0, h, 2) for x in range(0, w, 2)]
    return torch.cat(found)


REFERENCE = "; the reference is bilinear with antialiasing: embeddings differ by "


@pytest.mark.parametrize(
    "family, port, line",
    [
        ("siglip2", mlx_vlm_phi4_siglip, f"bicubic without antialiasing, taps outside the table dropped{REFERENCE}"),
        ("lfm2-vl", plain_bilinear, f"bilinear without antialiasing{REFERENCE}"),
        (
            "qwen3-vl",
            llama_cpp_qwen3_vl,
            "bilinear with antialiasing, tokens in 2 x 2 blocks; the reference is bilinear without antialiasing, "
            "aligned corners, tokens in 2 x 2 blocks: embeddings differ by ",
        ),
    ],
)
def test_ports_that_erred_are_named(family, port, line, identify):
    code, found = identify(family, port)
    assert code == 1 and found.startswith(line), found
    assert float(found.removeprefix(line).split(" %")[0]) > 10


def test_a_mended_port_is_equal(identify):
    """llama.cpp since pull request 17577."""
    code, _ = identify(
        "lfm2-vl", lambda table, sizes: torch.cat([antialiased_bilinear(table, size).flatten(0, 1) for size in sizes])
    )
    assert code == 0
