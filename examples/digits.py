"""A NaFlexVit that a CPU can train, and scikit-learn's digits cut into grids of many shapes.

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
PATCH = 4  # pixels on a side

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
    "fc_norm": True,  # left open, timm 1.0.16 builds a second norm that 1.0.31 does not have
}
HELD_OUT_GRIDS = ((3, 9), (4, 4), (5, 8), (8, 5), (6, 6), (9, 3), (12, 4), (4, 12), (10, 10))
# Patches per image. NaFlex draws one of them for each training batch, so that little of a batch is
# padding.
TRAIN_SEQ_LENS = (16, 32, 64)

Grid = tuple[int, int]
Batch = tuple[dict[str, Tensor | int], Tensor]


def split(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (train images, labels, held-out images, labels).

    20 % are held out. Images are (N, 1, 8, 8), in 0..1.
    """
    from sklearn.datasets import load_digits  # takes 3 seconds, and no other function needs it
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    train_images = torch.from_numpy(train_x).float().div(16).unsqueeze(1)
    test_images = torch.from_numpy(test_x).float().div(16).unsqueeze(1)
    return train_images, torch.from_numpy(train_y), test_images, torch.from_numpy(test_y)


def resize(image: Tensor, grid: Grid) -> Tensor:
    """Resize one image (1, 8, 8) in 0..1 to h x w patches: (1, h * PATCH, w * PATCH), in -1..1."""
    h, w = grid
    resized = F.interpolate(
        image[None],
        size=(h * PATCH, w * PATCH),
        mode="bilinear",
        antialias=True,
        align_corners=False,
    )
    return resized[0] * 2 - 1


def batches(
    images: Tensor,
    labels: Tensor,
    grids: Sequence[Grid],
    batch_size: int,
    max_seq_len: int | None = None,
) -> Iterator[Batch]:
    """Yield timm's NaFlex batches, in order: image i of (N, 1, 8, 8) is cut into grids[i].

    Each is ({patches (B, L, 16), patch_coord (B, L, 2), patch_valid (B, L), seq_len}, targets (B)).
    L is ``max_seq_len``, or the longest sequence of the batch: timm's collator by itself would pad
    to 576.
    """
    patchify = Patchify(PATCH)
    for start in range(0, len(images), batch_size):
        stop = min(start + batch_size, len(images))
        samples = []
        for i in range(start, stop):
            samples.append((patchify(resize(images[i], grids[i])), labels[i]))
        longest = max_seq_len or max(h * w for h, w in grids[start:stop])
        collate = NaFlexCollator(longest)
        yield collate(samples)


def random_grid(seq_len: int, generator: torch.Generator) -> Grid:
    """Draw a grid of about seq_len / 2 to seq_len patches, its aspect ratio in about [1/3, 3]."""
    u, v = torch.rand(2, generator=generator).tolist()
    area = seq_len * (0.5 + 0.5 * u)
    aspect = 3 ** (2 * v - 1)
    h = max(2, round(math.sqrt(area * aspect)))
    w = max(2, min(round(area / h), seq_len // h))
    return h, w


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale and shift each image of (B, 1, 8, 8) a little, at random.

    At most 6 degrees, 6 %, and a third of a pixel.
    """
    random = torch.rand(4, len(images), generator=generator) * 2 - 1  # in -1..1
    angle = random[0] * math.radians(6)
    zoom = 1 + 0.06 * random[1]
    shift_x, shift_y = random[2:] * 0.08

    cos = angle.cos() * zoom
    sin = angle.sin() * zoom
    theta = torch.stack([cos, -sin, shift_x, sin, cos, shift_y], 1).view(-1, 2, 3)  # (B, 2, 3)
    where = F.affine_grid(theta, images.shape, align_corners=False)
    return F.grid_sample(images, where, align_corners=False)


def train_batches(
    images: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Yield one shuffled, augmented epoch; every image gets a random grid of its own.

    All batches are full: the ranks of a distributed run need equal shards.
    """
    order = torch.randperm(len(images), generator=generator)
    for chosen in order.split(batch_size):
        if len(chosen) < batch_size:
            return
        length = torch.randint(len(TRAIN_SEQ_LENS), (), generator=generator)
        seq_len = TRAIN_SEQ_LENS[int(length)]
        grids = [random_grid(seq_len, generator) for _ in chosen]
        jittered = jitter(images[chosen], generator)
        yield from batches(jittered, labels[chosen], grids, batch_size, seq_len)


def held_out_batches(
    images: Tensor, labels: Tensor, batch_size: int = 128, grids: Sequence[Grid] = HELD_OUT_GRIDS
) -> Iterator[Batch]:
    """Yield every image once in every grid, always in the same order.

    Each batch mixes all the grids.
    """
    for turn in range(len(grids)):
        turned = [grids[(i + turn) % len(grids)] for i in range(len(images))]
        yield from batches(images, labels, turned, batch_size)


def build_model() -> NaFlexVit:
    """Return the untrained model: batch dict -> logits (B, 10)."""
    model = NaFlexVit(NaFlexVitCfg(**CONFIG), in_chans=1, num_classes=10)
    # 1,437 digits are too few to learn from noise that neighbouring cells of the table are alike,
    # so the table starts as sines.
    table = model.embeds.pos_embed  # (1, 16, 16, 64)
    _, height, width, channels = table.shape
    sines = build_sincos2d_pos_embed([height, width], dim=channels)
    with torch.no_grad():
        table.copy_(sines.view(table.shape))
    return model


def load_model(checkpoint: str | Path) -> NaFlexVit:
    """Return the trained model in eval mode."""
    model = build_model()
    model.load_state_dict(load_file(checkpoint), strict=True)
    return model.eval()


@torch.inference_mode()
def accuracy(model: nn.Module, data: Iterable[Batch]) -> float:
    """Return the share of the samples that the model gets right, over all batches."""
    was_training = model.training
    model.eval()
    right = 0
    total = 0
    for inputs, targets in data:
        predicted = model(inputs).argmax(1)
        right += int((predicted == targets).sum())
        total += len(targets)
    model.train(was_training)
    return right / total


if __name__ == "__main__":
    print(f"{__doc__}\ntrain_digits.py and drift_report.py use it.")
