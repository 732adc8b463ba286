"""Each family's convention is that of its library's own code."""

from importlib import import_module

import pytest
import torch
from on_the_kit import in_blocks, random_table, resized, tokens_of

from vit_ports.conventions import conventions
from vit_ports.families import FAMILIES

ASKED = [(12, 20), (30, 8), (4, 18)]
CHANNELS = 8


def table_of(side):
    return random_table(6, CHANNELS, (side, side))


def fill(parameter, table):
    with torch.no_grad():
        parameter.copy_(table.reshape(parameter.shape))


def modeling(name):
    return import_module(f"transformers.models.{name}.modeling_{name}")


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


# The others, as their libraries ask PyTorch for them.


def siglip2(table, sizes):
    return torch.cat([resized(table, size).flatten(0, 1) for size in sizes])


def ovis(table, sizes):
    return torch.cat([in_blocks(resized(table, size, "bicubic", False), 2) for size in sizes])


def radio(table, sizes):
    cut = []
    for h, w in sizes:
        square = resized(table, (max(h, w),) * 2, antialias=False)
        cut.append(square[:h, :w].flatten(0, 1))
    return torch.cat(cut)


# And the side of the family's table.
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
    if family in ("moonvit", "qwen3-vl"):
        pytest.importorskip("transformers", minversion="5.23")
    original, side = ORIGINALS[family]
    table = table_of(side)
    with torch.no_grad():
        want = original(table, ASKED)
    sizes = [(1, h, w) for h, w in ASKED]
    convention = FAMILIES[family]
    got = tokens_of(convention, table, sizes)
    off = (got - want).abs().max() / want.abs().max()
    assert off <= 2**-22 * side  # PyTorch's positions are float32
    assert convention in conventions(sizes)
