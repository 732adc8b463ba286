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

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    sizes = np.random.default_rng(0).integers(64, 160, (24, 2)).tolist()
    pictures = [(Image.new("RGB", size, "red" if i % 3 else "blue"), i % 3) for i, size in enumerate(sizes)]
    how = dict(train_seq_lens=(12, 24, 40), max_seq_len=40, batch_size=6, is_training=True, device="cpu", num_workers=1)
    where = dict(distributed=True, rank=dist.get_rank(), world_size=2, use_prefetcher=False, persistent_workers=False)
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2, num_classes=3)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch, target in create_naflex_loader(pictures, **how, **where):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), target).backward()
        optimizer.step()
    weights = sum(p.detach().double().sum().item() for p in model.parameters())
    method = NaFlexEmbeds._apply_learned_naflex_pos_embed.__module__
    print(f"rank {dist.get_rank()}: {method} {weights:.9f}\n", end="", flush=True)
    dist.destroy_process_group()
