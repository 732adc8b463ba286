"""Tokens that may not be written to, and gradients: of many samples, and in whose memory."""

from itertools import product

import pytest
import torch

from tests.support.checks import by_functions
from tests.support.oracles import OLD_TORCH, Case, relative, stock, tables
from tests.support.running import running
from timm_naflex_fast.functional import add_pos_embed_

EXACT = ("matmul", "interpolate_cached")
by_both = pytest.mark.parametrize(
    ("kind", "strategy"),
    [*product(["learned", "factorized"], EXACT), ("learned", "grid_sample")],
)


def leaf():
    return torch.zeros(1, 12, 4, requires_grad=True)


@torch.no_grad()
def without_gradients(x):
    return x[:]


@torch.inference_mode()
def inference_tensor():
    return torch.zeros(1, 12, 4)


# PyTorch's words.
MANY = "creation_meta" if torch.__version__ < "2.5" else "multiple views|in-?place"
NOT_WRITABLE = {  # what makes the tokens, and what the error says
    "a leaf": (leaf, "leaf"),
    "a view of a leaf": (
        lambda: leaf()[:],
        "leaf",
    ),
    "elements that share memory": (
        lambda: torch.zeros(1, 12, 1).expand(-1, -1, 4),
        "one and the same memory location",
    ),
    "an output of unbind": (lambda: torch.zeros(2, 1, 12, 4).unbind(0)[0], MANY),
    "a view made without gradients": (
        lambda: without_gradients(leaf() * 1),
        "in-place operation",
    ),
    "an inference tensor": (inference_tensor, "nference tensor"),
}
if OLD_TORCH:  # it does not ask when a function of autograd's marks a view as changed
    del NOT_WRITABLE["a view of a leaf"]


@by_both
@pytest.mark.parametrize("what", NOT_WRITABLE)
def test_nothing_is_written_where_autograd_forbids_it(strategy, kind, what):
    make, message = NOT_WRITABLE[what]
    case = Case(kind=kind, sizes=[(3, 4)])
    embeds = case.embeds()
    with pytest.raises(RuntimeError):
        stock(case, embeds, make(), case.coord())
    x = make()
    with pytest.raises(RuntimeError, match=message):
        by_functions(case, embeds, x, case.coord(), strategy)
    assert not x.detach().clone().any()


def test_a_batch_of_one_may_have_any_stride():
    x = torch.zeros(24).as_strided((1, 3, 4), (0, 8, 2))
    assert add_pos_embed_(x, torch.ones(6, 5, 4), grid_sizes=[(1, 3)]).min() > 0.9


@pytest.mark.parametrize("sizes", [[(6, 5)], [(6, 5)] * 3, [(3, 4)], [(3, 4), (2, 2)]], ids=str)
@by_both
def test_gradients_share_no_memory(strategy, sizes, kind):
    """What changes one parameter's gradient in place, as clipping does, changes no other."""
    case = Case(sizes=sizes, length=30, kind=kind)
    embeds = case.embeds()
    y = case.x().requires_grad_() * 1
    y.retain_grad()

    by_functions(case, embeds, y, case.coord(), strategy)
    y.square().sum().backward()

    grads = [y.grad, *(table.grad for table in tables(embeds))]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_coordinates_and_tables_may_change_before_the_backward_pass(backend):
    """A loader fills its buffer again; an optimizer steps: a linear map needs neither."""
    case = Case(sizes=[(3, 4), (5, 2)], length=30)
    embeds = case.embeds()
    tokens = torch.randn(2, 30, 1)

    def gradient(mode, run):
        coord = case.coord()
        with running(mode):
            out = run(tokens, patch_coord=coord)[0]
        coord.zero_()
        with torch.no_grad():
            embeds.pos_embed.mul_(1)
        return torch.autograd.grad(out.square().sum(), embeds.pos_embed)[0]

    want = gradient("stock", embeds)
    got = gradient("matmul", torch.compile(embeds, backend=backend, fullgraph=True))
    assert relative(got, want) <= 1e-5
