"""Tokens that may not be written to, gradients of many samples and many at once, and tracers."""

from itertools import product

import pytest
import torch

from tests.support.checks import HALF, by_functions
from tests.support.oracles import Case, relative, row_major, stock, tables
from timm_naflex_fast.batch.checks import check_writable

STRATEGIES, KINDS = ["matmul", "interpolate_cached", "grid_sample"], ["learned", "factorized"]


def case_of(kind, strategy, **settings):
    settings = dict(sizes=[(3, 4), (5, 2), (3, 4), (6, 5)], length=30) | settings
    return Case(kind=kind, use_grid_sample=strategy == "grid_sample", **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "dtype, samples, random",
    [*product((torch.float32, *HALF), [512], [False, True]), (torch.float32, 8192, False)],
)
def test_the_gradient_of_many_samples_on_one_grid_does_not_drift(
    kind, strategy, dtype, samples, random
):
    """Equal numbers are the worst case: every rounding goes the same way."""
    case = case_of(
        kind, strategy, sizes=[(2, 3)] * samples, table_size=(4, 4), channels=2, length=8
    )
    embeds, coord = case.embeds(), case.coord()
    upstream = (torch.randn(samples, 8, 2) if random else torch.full((samples, 8, 2), 0.1)).to(
        dtype
    )

    def gradients(add, dtype):
        x = torch.zeros(samples, 8, 2, dtype=dtype) * 1
        add(case, embeds, x, coord)
        return torch.autograd.grad(x, tables(embeds), upstream.to(dtype))

    exact, timms = gradients(stock, torch.float64), gradients(stock, dtype)
    ours = gradients(lambda *a: by_functions(*a, strategy), dtype)
    for truth, theirs, mine in zip(exact, timms, ours):
        # In half precision the gradient of an embedding may be rounded to the tokens' dtype;
        # nothing else may be.
        allowed = (
            3e-6
            if dtype is torch.float32
            else max(relative(theirs, truth), 2 * torch.finfo(dtype).eps)
        )
        assert relative(mine, truth) <= min(allowed, 0.01)


def leaf(channels):
    return torch.zeros(1, 12, channels, requires_grad=True)


MANY = (
    "creation_meta" if torch.__version__ < "2.5" else "multiple views|in-?place"
)  # PyTorch's words
NOT_WRITABLE = {  # what makes the tokens, and what the error says
    "a leaf": (lambda: leaf(4), "it is a leaf tensor that requires a gradient"),
    "a view of a leaf": (
        lambda: leaf(4)[:],
        "it is a view of a leaf tensor that requires a gradient",
    ),
    "elements that share memory": (
        lambda: torch.zeros(1, 12, 1).expand(-1, -1, 4),
        "one and the same memory location",
    ),
    "an output of unbind": (lambda: torch.zeros(2, 1, 12, 4).unbind(0)[0], MANY),
    "an output of split": (lambda: (leaf(8) * 1).split(4, -1)[1], MANY),
    "a view made without gradients": (
        lambda: torch.no_grad()(lambda x: x[:])(leaf(4) * 1),
        "in-place operation",
    ),
    "an inference tensor": (
        torch.inference_mode()(lambda: torch.zeros(1, 12, 4)),
        "made in inference mode, which has",
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", NOT_WRITABLE)
def test_nothing_is_written_where_autograd_forbids_it(strategy, kind, what):
    case = case_of(kind, strategy, sizes=[(3, 4)], length=12)
    embeds, (make, message) = case.embeds(), NOT_WRITABLE[what]
    for trained in (True, False):
        x = make()
        if trained or x.is_inference():  # otherwise PyTorch allows some of it
            with pytest.raises(RuntimeError):
                stock(case, embeds.requires_grad_(trained), make(), case.coord())
            with pytest.raises(RuntimeError, match=message):
                by_functions(case, embeds, x, case.coord(), strategy)
            assert not x.detach().clone().any()


def test_what_may_be_written_to():
    leaf = torch.zeros(2, 3, 4, requires_grad=True)
    with torch.no_grad():
        check_writable(leaf), check_writable(leaf[:1])
    for x in (leaf * 1, (leaf * 1)[:1], torch.zeros(24).as_strided((1, 3, 4), (0, 8, 2))):
        check_writable(x)
    with pytest.raises(RuntimeError, match="one and the same memory location"):
        check_writable(torch.zeros(2, 3, 1).expand(-1, -1, 2))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_gradients(strategy, kind):
    case, found = case_of(kind, strategy), []
    for adds in (stock, lambda *a: by_functions(*a, strategy)):
        embeds, leaf = case.embeds(), case.x().requires_grad_()
        scale = torch.ones(4, requires_grad=True)
        out = leaf * scale
        adds(case, embeds, out, case.coord())
        upstream = torch.randn(5, *out.shape, generator=torch.Generator().manual_seed(1))
        inputs = [leaf, scale, *tables(embeds)]
        found.append(torch.autograd.grad(out, inputs, upstream, is_grads_batched=True))
    for theirs, mine in zip(*found):
        assert mine.shape == theirs.shape and relative(mine, theirs) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["matmul", "grid_sample"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("ar_preserving", [False, True])
def test_jit_trace_holds_for_other_grids(kind, strategy, grad, ar_preserving):
    case = case_of(kind, strategy, ar_preserving=ar_preserving)
    embeds = case.embeds()
    embeds.forward = lambda x, coord: by_functions(case, embeds, x * 1, coord, strategy)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(embeds, (case.x(), case.coord()))
        other, want = row_major([(5, 6), (2, 2), (1, 30), (7, 3)], 30), case.x()
        with torch.no_grad():
            stock(case, embeds, want, other)
        torch.testing.assert_close(traced(case.x(), other).detach(), want, atol=2e-5, rtol=0)
