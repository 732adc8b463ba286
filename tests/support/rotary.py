"""timm's rotary embeddings: small ones of each type, timm's own and ours."""

import inspect
from types import SimpleNamespace

import pytest
import timm.layers.pos_embed_sincos as timms
import torch
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

from tests.support.oracles import PRISTINE
from timm_naflex_fast.rope.batched import batched_rope
from timm_naflex_fast.rope.settings import read_rope

FIELDS = inspect.signature(NaFlexVitCfg).parameters
if "rope_type" not in FIELDS:
    pytest.skip("this timm's NaFlexVit has no rotary embeddings", allow_module_level=True)

CLASSES = {
    name: getattr(timms, cls)
    for name, cls in (
        ("axial", "RotaryEmbeddingCat"),
        ("dinov3", "RotaryEmbeddingDinoV3"),
        ("mrope", "RotaryEmbeddingMRope"),
        ("mixed", "RotaryEmbeddingMixed"),
    )
    if hasattr(timms, cls)
}
AUGMENTED = [
    kind for kind, cls in CLASSES.items() if "shift_coords" in inspect.signature(cls).parameters or kind == "dinov3"
]
NEW_TIMM = hasattr(timms, "_build_grid")  # per-grid reference shapes, augmentation and dtypes of every type
DIM, HEADS, DEPTH = 16, 3, 2


def build(kind, **options):
    """timm's module, with those of the options that the installed one takes."""
    cls = CLASSES[kind]
    if kind == "axial":
        options = dict(in_pixels=False) | options
    elif kind == "mrope":
        options = dict(mrope_section=(2, 3, 3)) | options
    elif kind == "mixed":
        options = dict(depth=DEPTH, num_heads=HEADS) | options
    takes = inspect.signature(cls).parameters
    if "takes_all" not in options and kind in ("mrope", "mixed"):  # types that have fewer settings
        options = {k: v for k, v in options.items() if k not in ("grid_offset", "rotate_half", "ref_feat_shape")}
    options = {k: v for k, v in options.items() if k in takes}
    if kind == "mrope":
        options.pop("grid_indexing", None)
    return cls(DIM * HEADS if kind == "mixed" else DIM, **options)


def as_tensor(tables):
    return tables if isinstance(tables, torch.Tensor) else torch.stack(list(tables))


def stock(rope, x, coord, prefix=0):
    """timm's own result; mixed ones stacked. Releases between 1.0.20 and 1.0.31 cannot make mixed ones: by sample."""
    vit = SimpleNamespace(rope=rope, rope_is_mixed=hasattr(rope, "freqs"), num_prefix_tokens=prefix)
    try:
        return as_tensor(PRISTINE[NaFlexVit]["_generate_rope_naflex"](vit, x, coord))
    except TypeError:
        assert vit.rope_is_mixed and not NEW_TIMM
    out = torch.zeros(DEPTH, len(x), HEADS, x.shape[1] - prefix, 2 * DIM)
    for sample, (h, w) in enumerate((coord.amax(1) + 1).tolist()):
        out[:, sample, :, : h * w] = rope.get_embed((h, w))
    return out.to(x.dtype)


def ours(rope, x, coord, in_graph=False, prefix=0):
    described = read_rope(rope)
    assert not isinstance(described, str), described
    return as_tensor(batched_rope(described, coord, x.dtype, in_graph=in_graph))
