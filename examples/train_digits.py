"""Train the small NaFlexVit of digits.py on scikit-learn's digits: a few minutes on one CPU core.

    uv run examples/train_digits.py
    OMP_NUM_THREADS=1 uv run torchrun --nproc-per-node 2 examples/train_digits.py --steps 20 \\
        --out /tmp/try.safetensors
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import (
    CHECKPOINT,
    CONFIG,
    HELD_OUT_GRIDS,
    TRAIN_SEQ_LENS,
    Batch,
    accuracy,
    build_model,
    held_out_batches,
    split,
    train_batches,
)
from safetensors.torch import save_file
from timm.optim import param_groups_weight_decay
from torch import nn
from tqdm import tqdm

MODES = ("stock", "interpolate_cached", "grid_sample", "matmul")
RECIPE = {
    "optimizer": "AdamW",
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "schedule": "cosine",
    "clip_norm": 1.0,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mode", choices=MODES, default="matmul", help="stock leaves timm as it is"
    )
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--steps", type=int, help="stop after this many optimiser steps")
    parser.add_argument("--batch-size", type=int, default=16, help="over all processes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and the batches; the split is fixed"
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    return parser.parse_args()


def lr_factor(step: int, total: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def endless_batches(
    images: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Yield the batches of epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from train_batches(images, labels, batch_size, generator)


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """One process's share of a batch."""
    inputs, targets = batch
    shared = {}
    for name, value in inputs.items():
        shared[name] = value[rank::world] if torch.is_tensor(value) else value
    return shared, targets[rank::world]


def train(
    model: nn.Module, batches: Iterator[Batch], total: int, warmup: int, lr: float
) -> Iterator[float]:
    """Train by RECIPE, one step each time the next loss is asked for; ``total`` steps in all."""
    is_distributed = dist.is_available() and dist.is_initialized()
    wrapped = nn.parallel.DistributedDataParallel(model) if is_distributed else model
    # timm spares vectors, and what the model names: the position table.
    spared = model.no_weight_decay()
    decay = RECIPE["weight_decay"]
    groups = param_groups_weight_decay(model, decay, no_weight_decay_list=spared)
    optimizer = torch.optim.AdamW(groups, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total, warmup)
    )
    model.train()
    for inputs, targets in itertools.islice(batches, total):
        logits = wrapped(inputs)
        loss = F.cross_entropy(logits, targets, label_smoothing=RECIPE["label_smoothing"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), RECIPE["clip_norm"])
        optimizer.step()
        schedule.step()
        yield loss.item()


def write_checkpoint(
    args: argparse.Namespace, model: nn.Module, warmup: int, result: dict[str, Any]
) -> None:
    """Write the weights, and beside them a JSON file about how they were trained."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, args.out)
    recipe = {
        **RECIPE,
        "warmup_steps": warmup,
        "lr": args.lr,
        "batch_size": args.batch_size,
        "train_seq_lens": TRAIN_SEQ_LENS,
    }
    facts = {
        "model": CONFIG,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recipe": recipe,
        "epochs": args.epochs,
        "seed": args.seed,
        "mode": args.mode,
        "held_out_grids": [f"{h}x{w}" for h, w in HELD_OUT_GRIDS],
        **result,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "date": datetime.date.today().isoformat(),
    }
    args.out.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    args = parse_args()
    # torchrun starts this program several times, and tells each which one it is.
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide among {world} processes")
    if world > 1:
        dist.init_process_group("gloo")
    if args.mode != "stock":
        import timm_naflex_fast

        timm_naflex_fast.enable(mode=args.mode)

    torch.manual_seed(args.seed)
    train_images, train_labels, test_images, test_labels = split()
    model = build_model()
    per_epoch = len(train_images) // args.batch_size  # steps
    total = args.epochs * per_epoch
    if args.steps:
        total = min(total, args.steps)
    warmup = max(1, min(3 * per_epoch, total // 10))

    # Every process is seeded alike: all draw the same batch, and each takes its share.
    drawn = endless_batches(train_images, train_labels, args.batch_size, args.seed)
    shares = (share_of(batch, rank, world) for batch in drawn)
    start = time.perf_counter()
    step = 0
    losses = train(model, shares, total, warmup, args.lr)
    bar = tqdm(losses, "training", total, disable=rank != 0)
    for step, loss in enumerate(bar, 1):
        bar.set_postfix(epoch=(step - 1) // per_epoch + 1, loss=f"{loss:.3f}")
    seconds = time.perf_counter() - start

    if rank == 0:
        score = accuracy(model, held_out_batches(test_images, test_labels))
        tested = f"{len(test_images)} digits x {len(HELD_OUT_GRIDS)} grids"
        print(f"held-out accuracy {score:.2%} ({tested}), {seconds:.0f} s")
        result = {
            "steps": step,
            "processes": world,
            "held_out_accuracy": score,
            "held_out_images": len(test_images),
            "seconds": round(seconds, 1),
        }
        write_checkpoint(args, model, warmup, result)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
