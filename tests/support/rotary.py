"""timm's rotary embeddings: small ones of each type, timm's own and ours."""

import inspect
from types import SimpleNamespace

import timm.layers.pos_embed_sincos as timms
import torch
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

from tests.support.oracles import PRISTINE
from timm_naflex_fast.rope import batched_rope, read_rope

FIELDS = inspect.signature(NaFlexVitCfg).parameters
# Per-grid reference shapes, random coordinates and dtypes of every type.
NEW_TIMM = hasattr(timms, "_build_grid")
DIM = 16
HEADS = 3
DEPTH = 2

CLASSES = {}  # empty where this timm's NaFlexVit has no rotary embeddings
for kind, name in (
    ("axial", "RotaryEmbeddingCat"),
    ("dinov3", "RotaryEmbeddingDinoV3"),
    ("mrope", "RotaryEmbeddingMRope"),
    ("mixed", "RotaryEmbeddingMixed"),
):
    if "rope_type" in FIELDS and hasattr(timms, name):
        CLASSES[kind] = getattr(timms, name)
if not hasattr(CLASSES.get("dinov3"), "get_batch_embeds"):
    CLASSES.pop("dinov3", None)  # that of older timm stays with timm
TAKES = {kind: inspect.signature(cls).parameters for kind, cls in CLASSES.items()}

SETTINGS = {
    "axial": {"in_pixels": False},
    "mrope": {"mrope_section": (2, 3, 3)},
    "mixed": {"depth": DEPTH, "num_heads": HEADS},
}
# What a type takes and does not use.
UNUSED = {
    "mixed": {"grid_offset", "rotate_half", "ref_feat_shape"},
    "mrope": {"grid_offset", "rotate_half", "ref_feat_shape", "grid_indexing"},
}


def build(kind, **options):
    """timm's module, with those of the options that the installed one takes."""
    options = SETTINGS.get(kind, {}) | options
    taken = TAKES[kind].keys() - UNUSED.get(kind, set())
    for name in options.keys() - taken:
        del options[name]
    width = DIM * HEADS if kind == "mixed" else DIM
    return CLASSES[kind](width, **options)


def as_tensor(tables):
    return tables if isinstance(tables, torch.Tensor) else torch.stack(list(tables))


def stock(rope, coord, prefix=0, dtype=torch.float32):
    """timm's own result; mixed ones stacked.

    Releases between 1.0.20 and 1.0.31 cannot make mixed ones for a batch: sample by sample.
    """
    x = torch.zeros(len(coord), prefix + coord.shape[1], 4, dtype=dtype)
    is_mixed = hasattr(rope, "freqs")
    vit = SimpleNamespace(rope=rope, rope_is_mixed=is_mixed, num_prefix_tokens=prefix)
    try:
        return as_tensor(PRISTINE[NaFlexVit]["_generate_rope_naflex"](vit, x, coord))
    except TypeError:
        assert is_mixed and not NEW_TIMM
    out = torch.zeros(DEPTH, len(coord), HEADS, coord.shape[1], 2 * DIM)
    for sample, (h, w) in enumerate((coord.amax(1) + 1).tolist()):
        out[:, sample, :, : h * w] = rope.get_embed((h, w))
    return out.to(dtype)


def ours(rope, coord, in_graph=False, dtype=torch.float32):
    described = read_rope(rope)
    assert not isinstance(described, str), described
    return as_tensor(batched_rope(described, coord, dtype, traceable=in_graph))
