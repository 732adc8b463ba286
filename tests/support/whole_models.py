"""Small models of both libraries, which all take a batch and give one output, and batches for them.

Their names: those of ``NAMES``, and timm's kinds of rotary embeddings (``ROPE``).
"""

import pytest
import torch

from tests.support import tiny_siglip2
from tests.support.oracles import NEW_TIMM, small_vit, vit_batch
from tests.support.rotary import CLASSES, FIELDS

RADIO = {
    "pos_embed_grid_size": (128, 128),
    "pos_embed_interp_mode": "bilinear",
    "pos_embed_ar_preserving": True,
    "class_token": True,
    "reg_tokens": 4,
}
if NEW_TIMM:
    RADIO |= {"pos_embed_antialias": False, "pos_embed_align_corners": True}
NAFLEXVITS = {"learned": {}, "factorized": {"pos_embed": "factorized"}, "radio": RADIO}
NAMES = [*NAFLEXVITS, "siglip2"]
ROPE = {
    "axial": {},
    "dinov3": {"rope_temperature": 100.0},
    "mrope": {"rope_mrope_section": (2, 3, 3)},
    "mixed": {},
}
# Those that the installed timm can run as a whole model.
ROPE = {kind: options for kind, options in ROPE.items() if kind in CLASSES}
if "rope_rotate_half" not in FIELDS:
    ROPE.pop("dinov3", None)
RUNS = [kind for kind in ROPE if kind != "mixed" or NEW_TIMM]

SIZES = [
    [(3, 4), (12, 9), (3, 4), (8, 8), (4, 9)],
    [(2, 6), (7, 5), (9, 2)],
    [(1, 9), (10, 12), (5, 6), (2, 2)],
    [(9, 2)] * 5,
]
IMAGES = [
    torch.randn(count, 1, *size)
    for count, size in zip((2, 3, 5, 2), ((36, 52), (40, 20), (32, 32), (64, 4)))
]


class Siglip2(torch.nn.Module):
    """A tower of transformers."""

    def __init__(self, depth, table_side):
        super().__init__()
        transformers = pytest.importorskip("transformers", minversion="5.21")
        if not transformers.is_torch_available():
            pytest.skip("this transformers needs a newer torch")
        self.tower = tiny_siglip2.tower(table_side**2, num_hidden_layers=depth)

    def forward(self, batch):
        return self.tower(**batch).pooler_output

    def set_grad_checkpointing(self):
        self.train()
        self.tower.gradient_checkpointing_enable()


def build(name, depth=1, table_side=None, **options):
    """The model of this name, in eval mode, with a table of its usual size or of so many sides."""
    if name == "siglip2":
        return Siglip2(depth, table_side or 4)
    if name in ROPE:
        options |= dict(pos_embed="none", rope_type=name, **ROPE[name])
    if table_side:
        options |= dict(pos_embed_grid_size=(table_side, table_side))
    return small_vit(depth=depth, **{**NAFLEXVITS.get(name, {}), **options}).eval()


def batch_of(name, number=0, times=1):
    """One of four batches of other sizes and lengths, so many times."""
    return _batch(name, SIZES[number] * times, number)


def one_image(name, size):
    return _batch(name, [size], 0)


def _batch(name, sizes, seed):
    if name != "siglip2":
        return vit_batch(sizes, seed=seed)
    batch = vit_batch(sizes, patch=16, chans=3, seed=seed)
    return dict(
        pixel_values=batch["patches"],
        pixel_attention_mask=batch["patch_valid"].long(),
        spatial_shapes=torch.tensor(sizes),
    )
