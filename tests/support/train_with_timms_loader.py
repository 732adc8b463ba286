"""A training script that knows nothing of this package: timm's NaFlex loader with a worker, DDP under torchrun."""

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


def main():
    """Train for one epoch, and print what the test wants to know."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    loader = create_naflex_loader(
        Pictures(),
        patch_size=16,
        train_seq_lens=(12, 24, 40),
        max_seq_len=40,
        batch_size=6,
        is_training=True,
        num_workers=1,
        distributed=True,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        use_prefetcher=False,
        pin_memory=False,
        persistent_workers=False,
        device="cpu",
    )
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2, num_classes=3)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), target).backward()
        optimizer.step()
    weights = sum(p.detach().double().sum().item() for p in model.parameters())
    method = NaFlexEmbeds._apply_learned_naflex_pos_embed.__module__
    print(f"rank {dist.get_rank()}: {method} {weights:.9f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
