"""What two gloo processes train: in a module of its own, as a spawned process imports it."""

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

KINDS = ["learned", "factorized"]
WRAPS = ["ddp"] if fully_shard is None else ["ddp", "fsdp2"]
WHOLE = vit_batch([(5, 7), (12, 4), (3, 3), (8, 8)])


def train(model, batch):
    """Losses of three steps, and the last step's gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            grads[name.removeprefix("module.")] = whole
    return torch.stack(losses), grads


def wrapped(model, wrap):
    if wrap == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    share = {name: value[rank::2] for name, value in WHOLE.items()}
    results = {}
    for wrap in WRAPS:
        for kind in KINDS:
            with enable():
                losses, grads = train(wrapped(small_vit(pos_embed=kind), wrap), share)
                calls = dict(status().calls)
            dist.all_reduce(losses)
            results[wrap, kind] = losses / 2, grads, calls
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    # To take gloo's threads down sometimes aborts the process.
    os._exit(0)
