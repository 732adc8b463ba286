"""What every form of a strategy must hold: shared by the tests of the eager, the traceable and the Triton form."""

import torch

from tests.support.oracles import relative, stock, tables, truth

HALF = (torch.bfloat16, torch.float16)


def run(add, case, embeds, coord, x=None):
    """Output, gradient of x and gradients of the tables, for a fixed random upstream gradient; on the CPU."""
    device = tables(embeds)[0].device
    leaf = (case.x() if x is None else x).to(device).requires_grad_()
    out = leaf * 1  # timm adds into an activation, not into a leaf
    add(case, embeds, out, coord.to(device))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    grads = torch.autograd.grad((out * weight).sum(), [leaf, *tables(embeds)])
    return out.detach().cpu(), grads[0].cpu(), [grad.cpu() for grad in grads[1:]]


def equals_timm(ours, case, coord=None, device="cpu"):
    """Forward and gradients of a learned table, float32: 2e-6 of the largest table value, gradients 1e-5."""
    embeds, coord = case.embeds(), case.coord() if coord is None else coord
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    got, got_gx, got_gp = run(ours, case, embeds.to(device), coord)
    assert (got - want).abs().max() <= 2e-6 * max(1.0, embeds.pos_embed.abs().max().item())
    assert torch.equal(got_gx, want_gx)
    assert relative(got_gp[0], want_gp[0]) <= 1e-5


def as_close_to_float64_as_timm(ours, case, device="cpu"):
    """Which of two roundings lands nearer is luck; over the many channels that ``case`` should have it is not."""
    embeds = case.embeds()
    exact = truth(case, embeds)
    theirs, mine = (torch.zeros_like(exact, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        stock(case, embeds, theirs, case.coord())
        mine = mine.to(device)
        ours(case, embeds.to(device), mine, case.coord().to(device))
    one_rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (mine.cpu() - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + one_rounding
