"""What is kept of timm's own resize is bit for bit timm's, whatever was written to the table meanwhile."""

import pytest
import torch

from tests.support.checks import run
from tests.support.oracles import Case, kept_tensors, relative, stock
from timm_naflex_fast.functional import add_pos_embed_


def ours(case, embeds, x, coord):
    return add_pos_embed_(x, embeds.pos_embed, coord, strategy="interpolate_cached", **case.options)


CASE = Case(sizes=[(3, 4), (9, 2), (3, 4), (6, 5)], length=40)


def agree(embeds, x=None):
    """Whether cached and stock results are bit-identical just now."""
    with torch.no_grad():
        want = CASE.x() if x is None else x.clone()
        start = want.clone()
        stock(CASE, embeds, want, CASE.coord())
        # The first call meets the table, the second keeps finished ones, the third reads them.
        return all(torch.equal(want, ours(CASE, embeds, start.clone(), CASE.coord())) for _ in range(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda e: e.pos_embed.data.mul_(2),
        lambda e: e.pos_embed.data.view(-1)[-1:].add_(1e-7 * e.pos_embed.data.view(-1)[-1].abs() + 1e-9),
        lambda e: e.load_state_dict({k: v + 1 for k, v in e.state_dict().items()}),
        lambda e: e.to(torch.bfloat16),
        lambda e: e.to(torch.bfloat16).float(),
        lambda e: torch.optim.SGD(e.parameters(), 0.1).step(),
    ],
    ids=["data.mul_", "one element", "load_state_dict", "to(bf16)", "to(bf16).float", "optimizer.step"],
)
def test_the_next_forward_is_right_after(write):
    embeds = CASE.embeds()
    assert agree(embeds)
    for parameter in embeds.parameters():
        parameter.grad = torch.ones_like(parameter)
    write(embeds)
    assert agree(embeds)


def test_double_backward_works_as_in_timm():
    embeds, x = CASE.embeds(), CASE.x().requires_grad_()
    out = ours(CASE, embeds, x * 1, CASE.coord())
    (grad,) = torch.autograd.grad((out**2).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    assert embeds.pos_embed.grad.abs().max() > 0


def test_second_call_reuses_the_finished_tables(monkeypatch):
    embeds = CASE.embeds()
    assert agree(embeds)

    def no_more(*args, **kwargs):
        raise AssertionError("interpolated again")

    monkeypatch.setattr(torch.nn.functional, "interpolate", no_more)
    with torch.no_grad():
        ours(CASE, embeds, CASE.x(), CASE.coord())


def test_filled_in_inference_mode_it_serves_training():
    embeds, coord = CASE.embeds().requires_grad_(False), CASE.coord()
    with torch.inference_mode():
        for _ in range(2):
            ours(CASE, embeds, CASE.x(), coord)
    kept = kept_tensors()
    assert kept and not any(t.is_inference() for t in kept)
    x = CASE.x().requires_grad_()
    (ours(CASE, embeds, x * 1, coord) ** 2).sum().backward()  # frozen table: read from the cache
    embeds.requires_grad_()
    want, _, want_gp = run(stock, CASE, embeds, coord)
    got, _, got_gp = run(ours, CASE, embeds, coord)
    assert torch.equal(want, got) and relative(got_gp[0], want_gp[0]) <= 1e-5
