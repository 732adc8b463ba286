"""``naflex-fast identify`` says which convention a port followed, and what it should have.

With ``--family``, that of its library's own code.
"""

from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.checks import one_by_one
from tests.support.oracles import relative
from tests.support.tiny_recordings import random_table, tokens_of
from timm_naflex_fast.commands.cli.identify import FAMILIES
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.recordings.conventions import Convention, conventions

# (t, h, w): in blocks of one token alone, so few conventions are tried
SIZES = [(1, 5, 7), (2, 9, 3)]
ASKED = [(12, 20), (30, 8), (4, 18)]
CHANNELS = 8


def table_of(side):
    return random_table(6, CHANNELS, (side, side))


@pytest.fixture
def identify(tmp_path, capsys):
    """The command's exit status and what it prints, about a file of these tensors."""

    def identify(table, sizes, result, *options):
        file = tmp_path / "port.safetensors"
        save_file({"table": table, "sizes": torch.tensor(sizes), "result": result}, file)
        code = main(["identify", str(file), *options])
        out, err = capsys.readouterr()
        return code, out + err.partition("\n")[2]

    return identify


def ported(sizes, dtype=torch.float32, **settings):
    """The table, the sizes, and what a port of SigLIP-2 made of them that errs in ``settings``."""
    table = table_of(9)
    convention = Convention(**{**FAMILIES["siglip2"], **settings})
    return table, sizes, tokens_of(convention, table, sizes).to(dtype)


def test_the_reference_is_equal_and_half_precision_is_said(identify):
    code, out = identify(*ported(SIZES))
    assert code == 0 and out.startswith("equal to the reference, within the rounding of float32")
    halves = ported(SIZES, torch.bfloat16)
    assert identify(*halves)[0] == 1
    assert identify(*halves, "--precision", "bfloat16")[0] == 0


def test_what_cannot_be_compared_is_one_line(identify):
    code, out = identify(table_of(9), SIZES, torch.zeros(7, CHANNELS))
    assert code == 2 and "table must be (H0, W0, C) and result (89, C), channels last" in out
    code, out = identify(table_of(9), SIZES, torch.ones(89, CHANNELS), "--family", "ovis2.5")
    assert code == 2 and "sizes must be multiples of the reference's merge, 2" in out


def test_arrays_of_several_kinds_of_files_are_put_together_and_a_damaged_one_is_named(
    tmp_path, capsys
):
    table, sizes, result = ported(SIZES)
    first, rest = tmp_path / "result.npy", tmp_path / "rest.npz"
    np.save(first, result)
    np.savez(rest, table=table, sizes=sizes)
    assert main(["identify", str(first), str(rest)]) == 0
    rest.write_bytes(b"PK\x03\x04")
    assert main(["identify", str(first), str(rest)]) == 2
    assert f"naflex-fast identify: {rest} is no whole file of arrays" in capsys.readouterr().err


def fill(parameter, table):
    with torch.no_grad():
        parameter.copy_(table.reshape(parameter.shape))


def modeling(name):
    return import_module(f"transformers.models.{name}.modeling_{name}")


def siglip2(table, sizes):
    resize = modeling("siglip2").Siglip2VisionEmbeddings.resize_positional_embeddings
    padded = resize(table, torch.tensor(sizes), max_length=240)
    images = []
    for image, (h, w) in zip(padded, sizes):
        images.append(image[: h * w])
    return torch.cat(images)


def moonvit(table, sizes):
    config = modeling("kimi_k25").Kimi_K25VisionConfig(hidden_size=CHANNELS)
    embeddings = modeling("kimi_k25").Kimi_K25VisionPositionEmbeddings(config)
    fill(embeddings.position_embeddings, table)
    count = sum(h * w for h, w in sizes)
    tokens = torch.zeros(count, CHANNELS)
    grids = [(1, h, w) for h, w in sizes]
    return embeddings(tokens, torch.tensor(grids))


def qwen3_vl(table, sizes):
    config = modeling("qwen3_vl").Qwen3VLVisionConfig(
        depth=0,
        hidden_size=CHANNELS,
        num_heads=2,
        intermediate_size=8,
        out_hidden_size=8,
        deepstack_visual_indexes=[],
    )
    model = modeling("qwen3_vl").Qwen3VLVisionModel(config).eval()
    fill(model.pos_embed.weight, table)
    # What leaves the patch embedding is zero, so the first to read the sum reads the position
    # embeddings.
    seen = []
    model.patch_embed.forward = lambda pixels: torch.zeros(len(pixels), CHANNELS)
    model.rotary_pos_emb.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    grids = torch.tensor([(1, *size) for size in sizes])
    count = int(grids.prod(1).sum())
    model(torch.zeros(count, 1), grid_thw=grids)
    return seen[0]


def radio(table, sizes):
    config = modeling("radio").RadioConfig(hidden_size=CHANNELS)
    embeddings = modeling("radio").RadioPatchEmbeddings(config)
    fill(embeddings.position_embedding, table)
    resize = embeddings._interpolate_position_embedding
    return torch.cat([resize(size, torch.float32)[0] for size in sizes])


def ovis(table, sizes):
    """vLLM, models/siglip2navit.py (transformers has no Ovis2.5)."""
    return torch.cat(one_by_one(table, sizes, mode="bicubic", antialias=False, merge=2))


# And the side of its table.
ORIGINALS = {
    "siglip2": (siglip2, 16),
    "lfm2-vl": (siglip2, 16),
    "moonvit": (moonvit, 64),
    "qwen3-vl": (qwen3_vl, 48),
    "ovis2.5": (ovis, 32),
    "radio": (radio, 128),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_convention_is_that_of_the_original_library(family):
    if family != "ovis2.5":
        pytest.importorskip("transformers", minversion="5.23")
    original, side = ORIGINALS[family]
    table = table_of(side)
    with torch.no_grad():
        want = original(table, ASKED)
    sizes = [(1, h, w) for h, w in ASKED]
    convention = Convention(**FAMILIES[family])
    got = tokens_of(convention, table, sizes)
    assert relative(got, want.double()) <= 2**-22 * side  # PyTorch's positions are float32
    assert convention in conventions(sizes)
