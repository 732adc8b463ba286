"""What runs on a CPU and on a pretended device: functions of ``to``, which moves tensors.

Each gives results and their gradients.
"""

from functools import partial

import torch

from tests.support.oracles import row_major, seeded
from tests.support.rotary import build
from tests.support.second_device import moved
from timm_naflex_fast import functional as fast
from timm_naflex_fast.rope.batched import batched_rope
from timm_naflex_fast.rope.modules import read_rope

SIZES = [(3, 4), (9, 2), (3, 4), (6, 5), (1, 7), (8, 1)]
COORD = row_major(SIZES, 31)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def added(to, add, shapes, coord=COORD, move_coord=True, dtypes=2 * (torch.float32,), **options):
    """``add`` tables of these ``shapes`` to tokens; the result, gradients and a second derivative.

    ``dtypes``: of the tables, and of the tokens.
    """
    table_dtype, dtype = dtypes
    tables = [to(random(*shape, dtype=table_dtype, seed=shape[0])) for shape in shapes]
    x = to(random(*coord.shape[:2], 8, dtype=dtype, seed=1))
    inputs = [tensor.requires_grad_() for tensor in (x, *tables)]
    out = add(x * 1, *tables, to(coord) if move_coord else coord, **options)
    weight = to(random(*out.shape, dtype=dtype, seed=2)).requires_grad_()
    gradients = torch.autograd.grad(out, inputs, weight, create_graph=True)
    total = sum(gradient.square().sum() for gradient in gradients)
    return [out, *gradients, *torch.autograd.grad(total, weight)]


learned = partial(added, add=fast.add_pos_embed_, shapes=[(6, 5, 8)])
factorized = partial(added, add=fast.add_factorized_pos_embed_, shapes=[(6, 8), (5, 8)])


def embeds(to, sizes=((4, 6), (2, 2), (8, 4)), move_sizes=False, **options):
    table = to(random(6, 5, 8)).requires_grad_()
    if move_sizes:
        sizes = to(torch.tensor(sizes))
    out = fast.resample_pos_embeds(table, sizes, mode="bilinear", **options)
    return [out, *torch.autograd.grad(out.square().sum(), table)]


def patch_kernel(to, mode="bicubic", dtype=torch.float32, size=(9, 14)):
    weight = to(random(12, 3, 16, 16, dtype=dtype)).requires_grad_()
    out = fast.resample_patch_kernel(weight, size, mode=mode)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    return [out, grad, *torch.autograd.grad(grad.square().sum(), weight)]


def rope(to, kind, times=1, **options):
    """``times``: the batch, so often."""
    torch.manual_seed(0)
    module = moved(build(kind, **options).train(), to)
    torch.manual_seed(1)
    coord = to(COORD.repeat(times, 1, 1))
    found = batched_rope(read_rope(module), coord, torch.float32)
    if kind != "mixed":
        return [found]
    tables = list(found)
    total = sum(table.square().sum() + table.sum() for table in tables)
    return [*tables, *torch.autograd.grad(total, module.freqs)]
