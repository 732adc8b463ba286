"""What two gloo processes train, in a module of its own: a spawned process imports no more than it
needs."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.oracles import small_vit, vit_batch
from timm_naflex_fast import enable, status

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch < 2.6
    fully_shard = None

KINDS, WRAPS = ["learned", "factorized"], ["ddp"] + ["fsdp2"] * (fully_shard is not None)
WHOLE = vit_batch([(5, 7), (12, 4), (3, 3), (8, 8)])


def train(model, batch):
    """Losses of three steps, and the last step's gradients."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def wrapped(model, wrap):
    if wrap == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results, share = {}, {name: value[rank::2] for name, value in WHOLE.items()}
    for wrap in WRAPS:
        for kind in KINDS:
            with enable():
                losses, grads = train(wrapped(small_vit(pos_embed=kind), wrap), share)
                calls = dict(status().calls)
            dist.all_reduce(losses)
            grads = {
                n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()
            }
            results[wrap, kind] = (
                losses / 2,
                {n.removeprefix("module."): g for n, g in grads.items()},
                calls,
            )
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    # To take gloo's threads down sometimes aborts the process ("terminate called without an active
    # exception").
    os._exit(0)
