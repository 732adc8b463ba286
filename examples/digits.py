"""A NaFlexVit small enough to train on a CPU, and scikit-learn's digits cut into grids of many
shapes for it.

The 8x8 digits are resized to h x w patches of 4x4 pixels, with h and w drawn apart, so one batch
mixes many grids. The position table is 16x16, larger than nearly every grid drawn here, so it is
mostly shrunk: antialiasing counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from timm.layers import build_sincos2d_pos_embed
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn

CHECKPOINT = Path(__file__).with_name("digits_naflexvit.safetensors")
PATCH = 4
# Only fields that timm 1.0.16 has too. Antialiased bicubic resampling is what every timm version
# does by default.
CONFIG = {
    "patch_size": PATCH,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "pos_embed": "learned",
    "pos_embed_grid_size": (16, 16),
    "pos_embed_interp_mode": "bicubic",
    "global_pool": "avg",
    "weight_init": "jax",
    "fc_norm": True,  # said outright: left open, timm 1.0.16 builds a second norm that 1.0.31 does not have
}
HELD_OUT_GRIDS = ((3, 9), (4, 4), (5, 8), (8, 5), (6, 6), (9, 3), (12, 4), (4, 12), (10, 10))
# Patches per image, drawn once for each training batch as NaFlex does, so that little of a batch is
# padding.
TRAIN_SEQ_LENS = (16, 32, 64)

Grid = tuple[int, int]
Batch = tuple[dict[str, Tensor | int], Tensor]


def split(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (train images, labels, held-out images, labels); 20 % held out, images [N, 1, 8, 8] in
    0..1."""
    from sklearn.datasets import load_digits  # takes 3 seconds, and no other function needs it
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    images = [torch.from_numpy(x).float().div(16).unsqueeze(1) for x in (train_x, test_x)]
    return images[0], torch.from_numpy(train_y), images[1], torch.from_numpy(test_y)


def resize(image: Tensor, grid: Grid) -> Tensor:
    """Resize one image [1, 8, 8] in 0..1 to h x w patches: [1, h * PATCH, w * PATCH] in -1..1."""
    size = (grid[0] * PATCH, grid[1] * PATCH)
    out = F.interpolate(
        image[None], size=size, mode="bilinear", antialias=True, align_corners=False
    )
    return out[0] * 2 - 1


def batches(
    images: Tensor,
    labels: Tensor,
    grids: Sequence[Grid],
    batch_size: int,
    max_seq_len: int | None = None,
) -> Iterator[Batch]:
    """Yield timm's collated NaFlex batches, in order, image i of [N, 1, 8, 8] cut into grids[i].

    Each is ({patches [B, L, 16], patch_coord [B, L, 2], patch_valid [B, L], seq_len}, targets [B]).
    L is max_seq_len, or the longest sequence of the batch: timm's collator by itself would pad to
    576.
    """
    patchify = Patchify(PATCH)
    for start in range(0, len(images), batch_size):
        part = range(start, min(start + batch_size, len(images)))
        longest = max_seq_len or max(math.prod(grids[i]) for i in part)
        yield NaFlexCollator(longest)(
            [(patchify(resize(images[i], grids[i])), labels[i]) for i in part]
        )


def random_grid(seq_len: int, generator: torch.Generator) -> Grid:
    """Draw a grid of at most seq_len patches and at least about half of that, its aspect ratio in
    about [1/3, 3]."""
    u, v = torch.rand(2, generator=generator).tolist()
    area, aspect = seq_len * (0.5 + 0.5 * u), 3 ** (2 * v - 1)
    h = max(2, round(math.sqrt(area * aspect)))
    return h, max(2, min(round(area / h), seq_len // h))


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate (6 degrees at most), scale (6 %) and shift (a third of a pixel) each image of [B, 1,
    8, 8] at random."""
    r = torch.rand(4, len(images), generator=generator) * 2 - 1
    angle, zoom, shift = r[0] * math.radians(6), 1 + 0.06 * r[1], r[2:] * 0.08
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    theta = torch.stack([cos, -sin, shift[0], sin, cos, shift[1]], 1).view(-1, 2, 3)
    return F.grid_sample(
        images, F.affine_grid(theta, images.shape, align_corners=False), align_corners=False
    )


def train_batches(
    images: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Yield one shuffled, augmented epoch of full batches; every image gets a random grid of its
    own."""
    for pick in torch.randperm(len(images), generator=generator).split(batch_size):
        if len(pick) < batch_size:
            return  # the ranks of a distributed run need equal shards
        seq_len = TRAIN_SEQ_LENS[int(torch.randint(len(TRAIN_SEQ_LENS), (), generator=generator))]
        grids = [random_grid(seq_len, generator) for _ in pick]
        yield from batches(
            jitter(images[pick], generator), labels[pick], grids, batch_size, seq_len
        )


def held_out_batches(
    images: Tensor, labels: Tensor, batch_size: int = 128, grids: Sequence[Grid] = HELD_OUT_GRIDS
) -> Iterator[Batch]:
    """Yield every image once in every grid, always in the same order; each batch mixes all the
    grids."""
    for turn in range(len(grids)):
        yield from batches(
            images, labels, [grids[(i + turn) % len(grids)] for i in range(len(images))], batch_size
        )


def build_model() -> NaFlexVit:
    """Return the untrained model: batch dict -> logits [B, 10]."""
    model = NaFlexVit(NaFlexVitCfg(**CONFIG), in_chans=1, num_classes=10)
    table = model.embeds.pos_embed
    with (
        torch.no_grad()
    ):  # 1,437 digits are too few to learn from noise that neighbouring cells are alike
        table.copy_(
            build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3]).view(table.shape)
        )
    return model


def load_model(checkpoint: str | Path = CHECKPOINT) -> NaFlexVit:
    """Return the trained model in eval mode."""
    if not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"{checkpoint} is missing; `uv run examples/train_digits.py` makes it"
        )
    model = build_model()
    model.load_state_dict(load_file(checkpoint), strict=True)
    return model.eval()


@torch.inference_mode()
def accuracy(model: nn.Module, data: Iterable[Batch]) -> float:
    """Return the share of samples in `data` that the model gets right, over all its batches."""
    was_training = model.training
    model.eval()
    right = total = 0
    for inputs, targets in data:
        right += int((model(inputs).argmax(1) == targets).sum())
        total += len(targets)
    model.train(was_training)
    return right / total
