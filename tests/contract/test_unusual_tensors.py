"""Tokens that may not be written to; gradients of many samples, and many at once."""

from functools import partial

import pytest
import torch

from tests.support.checks import HALF, by_functions
from tests.support.oracles import OLD_TORCH, Case, relative, stock, tables
from timm_naflex_fast.batch.tokens import check_no_shared_elements

by_strategy = pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
by_kind = pytest.mark.parametrize("kind", ["learned", "factorized"])


def case_of(kind, strategy, **settings):
    settings = dict(sizes=[(3, 4), (5, 2), (3, 4), (6, 5)], length=30) | settings
    return Case(kind=kind, use_grid_sample=strategy == "grid_sample", **settings)


def gradients(add, case, embeds, upstream):
    """The gradients of the tables, from that of the tokens, in its dtype."""
    x = torch.zeros_like(upstream) * 1
    add(case, embeds, x, case.coord())
    return torch.autograd.grad(x, tables(embeds), upstream)


MANY_SAMPLES = [(torch.float32, 8192, False)]
for dtype in (torch.float32, *HALF):
    MANY_SAMPLES += [(dtype, 512, False), (dtype, 512, True)]


@by_kind
@by_strategy
@pytest.mark.parametrize("dtype, samples, is_random", MANY_SAMPLES)
def test_the_gradient_of_many_samples_on_one_grid_does_not_drift(
    kind, strategy, dtype, samples, is_random
):
    sizes = [(2, 3)] * samples
    case = case_of(kind, strategy, sizes=sizes, table_size=(4, 4), channels=2, length=8)
    embeds = case.embeds()
    # Equal numbers are the worst case: every rounding goes the same way.
    shape = (samples, 8, 2)
    upstream = torch.randn(shape) if is_random else torch.full(shape, 0.1)
    upstream = upstream.to(dtype)

    exact = gradients(stock, case, embeds, upstream.double())
    timms = gradients(stock, case, embeds, upstream)
    ours = gradients(partial(by_functions, strategy=strategy), case, embeds, upstream)

    for truth, theirs, mine in zip(exact, timms, ours, strict=True):
        allowed = 3e-6
        if dtype is not torch.float32:
            # The gradient of an embedding may be rounded to the tokens' dtype; nothing else may.
            allowed = max(relative(theirs, truth), 2 * torch.finfo(dtype).eps)
        assert relative(mine, truth) <= min(allowed, 0.01)


def leaf(channels):
    return torch.zeros(1, 12, channels, requires_grad=True)


@torch.no_grad()
def without_gradients(x):
    return x[:]


@torch.inference_mode()
def inference_tensor():
    return torch.zeros(1, 12, 4)


# PyTorch's words.
MANY = "creation_meta" if torch.__version__ < "2.5" else "multiple views|in-?place"
NOT_WRITABLE = {  # what makes the tokens, and what the error says
    "a leaf": (lambda: leaf(4), "leaf"),
    "a view of a leaf": (
        lambda: leaf(4)[:],
        "leaf",
    ),
    "elements that share memory": (
        lambda: torch.zeros(1, 12, 1).expand(-1, -1, 4),
        "one and the same memory location",
    ),
    "an output of unbind": (lambda: torch.zeros(2, 1, 12, 4).unbind(0)[0], MANY),
    "an output of split": (lambda: (leaf(8) * 1).split(4, -1)[1], MANY),
    "a view made without gradients": (
        lambda: without_gradients(leaf(4) * 1),
        "in-place operation",
    ),
    "an inference tensor": (inference_tensor, "nference tensor"),
}
if OLD_TORCH:  # it does not ask when a function of autograd's marks a view as changed
    del NOT_WRITABLE["a view of a leaf"]


@by_strategy
@by_kind
@pytest.mark.parametrize("what", NOT_WRITABLE)
def test_nothing_is_written_where_autograd_forbids_it(strategy, kind, what):
    make, message = NOT_WRITABLE[what]
    case = case_of(kind, strategy, sizes=[(3, 4)], length=12)
    embeds = case.embeds()
    with pytest.raises(RuntimeError):
        stock(case, embeds, make(), case.coord())
    x = make()
    with pytest.raises(RuntimeError, match=message):
        by_functions(case, embeds, x, case.coord(), strategy)
    assert not x.detach().clone().any()


def test_a_batch_of_one_may_have_any_stride():
    check_no_shared_elements(torch.zeros(24).as_strided((1, 3, 4), (0, 8, 2)))


@by_strategy
@by_kind
def test_batches_of_gradients(strategy, kind):
    case = case_of(kind, strategy)
    found = []
    for add in (stock, partial(by_functions, strategy=strategy)):
        embeds = case.embeds()
        leaf = case.x().requires_grad_()
        scale = torch.ones(4, requires_grad=True)
        out = leaf * scale
        add(case, embeds, out, case.coord())
        upstream = torch.randn(5, *out.shape, generator=torch.Generator().manual_seed(1))
        inputs = [leaf, scale, *tables(embeds)]
        found.append(torch.autograd.grad(out, inputs, upstream, is_grads_batched=True))
    for theirs, mine in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert relative(mine, theirs) <= 1e-5
