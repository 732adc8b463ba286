"""Train the small NaFlexVit of digits.py on scikit-learn's digits: a few minutes on one CPU core.

uv run examples/train_digits.py OMP_NUM_THREADS=1 uv run torchrun --nproc-per-node 2
examples/train_digits.py --steps 20 --out /tmp/try.safetensors
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

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import (
    CHECKPOINT,
    CONFIG,
    HELD_OUT_GRIDS,
    TRAIN_SEQ_LENS,
    accuracy,
    build_model,
    held_out_batches,
    split,
    train_batches,
)
from safetensors.torch import save_file
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


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW that spares vectors and what timm names in no_weight_decay, which holds the position
    table."""
    spared = model.no_weight_decay()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and n not in spared]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1 or n in spared]
    return torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr, weight_decay=weight_decay
    )


def lr_factor(step: int, total: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def train(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    total: int,
    warmup: int,
    *,
    lr: float,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[float]:
    """Train by RECIPE, one optimiser step each time the next loss is asked for; `total` steps in
    all.

    Every process is seeded alike: all draw the same batch of `batch_size`, and each takes its
    share.
    """
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = make_optimizer(model, lr, RECIPE["weight_decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total, warmup)
    )
    generator = torch.Generator().manual_seed(seed)
    epochs = (train_batches(images, labels, batch_size, generator) for _ in itertools.count())
    for inputs, targets in itertools.islice(itertools.chain.from_iterable(epochs), total):
        model.train()
        inputs = {k: v[rank::world] if torch.is_tensor(v) else v for k, v in inputs.items()}
        loss = F.cross_entropy(
            wrapped(inputs), targets[rank::world], label_smoothing=RECIPE["label_smoothing"]
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), RECIPE["clip_norm"])
        optimizer.step()
        schedule.step()
        yield loss.item()


def main() -> None:
    args = parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide among {world} processes")
    if world > 1:
        dist.init_process_group("gloo")
    if args.mode != "stock":
        import timm_naflex_fast

        timm_naflex_fast.enable(mode=args.mode)

    torch.manual_seed(args.seed)
    train_x, train_y, test_x, test_y = split()
    model = build_model()
    per_epoch = len(train_x) // args.batch_size
    total = min(args.epochs * per_epoch, args.steps or args.epochs * per_epoch)
    warmup = max(1, min(3 * per_epoch, total // 10))
    start, step = time.perf_counter(), 0
    steps = train(
        model,
        train_x,
        train_y,
        total,
        warmup,
        lr=args.lr,
        batch_size=args.batch_size,
        seed=args.seed,
        rank=rank,
        world=world,
    )
    bar = tqdm(steps, "training", total, disable=rank != 0)
    for step, loss in enumerate(bar, 1):
        bar.set_postfix(epoch=(step - 1) // per_epoch + 1, loss=f"{loss:.3f}")
    seconds = time.perf_counter() - start

    if rank == 0:
        score = accuracy(model, held_out_batches(test_x, test_y))
        print(
            f"held-out accuracy {score:.2%} ({len(test_x)} digits x {len(HELD_OUT_GRIDS)} grids), {seconds:.0f} s"
        )
        args.out.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, args.out)
        record = {
            "model": CONFIG,
            "parameters": sum(p.numel() for p in model.parameters()),
            "recipe": RECIPE
            | {
                "warmup_steps": warmup,
                "lr": args.lr,
                "batch_size": args.batch_size,
                "train_seq_lens": TRAIN_SEQ_LENS,
            },
            "epochs": args.epochs,
            "steps": step,
            "seed": args.seed,
            "processes": world,
            "mode": args.mode,
            "held_out_accuracy": score,
            "held_out_images": len(test_x),
            "held_out_grids": [f"{h}x{w}" for h, w in HELD_OUT_GRIDS],
            "torch": torch.__version__,
            "timm": timm.__version__,
            "date": datetime.date.today().isoformat(),
            "seconds": round(seconds, 1),
        }
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
