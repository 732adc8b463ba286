"""A training script that knows nothing of this package: timm's NaFlex loader, DDP under torchrun, pickled by name."""

import argparse
import os
import random

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from timm.data.naflex_loader import create_naflex_loader
from timm.models.naflexvit import NaFlexEmbeds
from torch.nn.parallel import DistributedDataParallel


class Pictures(torch.utils.data.Dataset):
    """Smooth random pictures of many shapes, labelled by their brightest colour."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        small = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        size = tuple(generator.integers(64, 160, 2).tolist())
        return Image.fromarray(small).resize(size), int(small.mean((0, 1)).argmax())


def train(workers, start_method, rank=0, world=1):
    """The losses of one epoch."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    torch.multiprocessing.set_start_method(start_method, force=True)
    loader = create_naflex_loader(
        Pictures(),
        patch_size=16,
        train_seq_lens=(12, 24, 40),
        max_seq_len=40,
        batch_size=6,
        is_training=True,
        num_workers=workers,
        distributed=world > 1,
        rank=rank,
        world_size=world,
        use_prefetcher=False,
        pin_memory=False,
        persistent_workers=False,
        device="cpu",
    )
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2, num_classes=3)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for batch, target in loader:
        loss = F.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(p.detach().double().sum().item() for p in model.parameters())


def main():
    """Train, and print what the test wants to know."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="fork", help="how workers start")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    losses, weights = train(options.workers, options.mode, rank, world)
    method = NaFlexEmbeds._apply_learned_naflex_pos_embed.__module__
    print(f"rank {rank}: {method} {weights:.9f} {' '.join(f'{loss:.6f}' for loss in losses)}\n", end="", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
