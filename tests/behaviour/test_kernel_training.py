"""A NaFlexVit that trains on batches of several patch sizes from timm's own NaFlex loader."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.naflex_loader import create_naflex_loader

from tests.support.oracles import relative, small_vit
from tests.support.running import running

PATCH_SIZES = [8, 12, 16, 20, 32]


class Images(torch.utils.data.Dataset):
    """Smooth random pictures of many shapes, labelled by their brightest colour."""

    def __init__(self, count=96):
        generator = np.random.default_rng(0)
        self.pictures = []
        for _ in range(count):
            small = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
            width, height = generator.integers(64, 160, 2).tolist()
            self.pictures.append((Image.fromarray(small).resize((width, height)), int(small.mean((0, 1)).argmax())))

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index]


def batches(epochs=4):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    loader = create_naflex_loader(
        Images(),
        patch_size_choices=PATCH_SIZES,
        train_seq_lens=(12, 24, 40),
        max_seq_len=40,
        batch_size=6,
        is_training=True,
        num_workers=0,
        use_prefetcher=False,
        pin_memory=False,
        persistent_workers=False,
        device="cpu",
    )
    found = []
    for epoch in range(epochs):
        loader.dataset.set_epoch(epoch)
        found += list(loader)
    return found


def train(mode, found):
    model, losses = small_vit(patch_size=16, enable_patch_interpolator=True, in_chans=3), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with running(mode, component="patch_embed"):
        for batch, target in found:
            loss = F.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.tensor(losses), model.embeds.proj.weight.detach()


def test_the_same_losses_as_timm():
    found = batches()
    assert {batch["patches"].shape[2] for batch, _ in found} == set(PATCH_SIZES)
    (want, want_weight), (got, weight) = train("stock", found), train("matmul", found)
    assert len(want) >= 20 and (want[0] - want).abs().max() > 0.05  # it does learn, and weights move
    assert (got - want).abs().max() <= 1e-4
    assert relative(weight, want_weight) <= 1e-3
