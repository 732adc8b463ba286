"""The eager path of a GPU, with real numbers on a pretended device (``second_device``).

Each case is a function of ``to``, which moves tensors: it runs on the CPU, and with every tensor on
the device. No operator may mix the two.
"""

from functools import partial
from itertools import product

import pytest
import torch

from tests.support.oracles import relative, row_major, seeded, small_vit
from tests.support.rotary import CLASSES, build
from tests.support.running import running
from tests.support.second_device import OnDevice, SecondDevice, moved, waits
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.rope import batched_rope, read_rope

pytestmark = pytest.mark.usefixtures("clean")
EXACT = "matmul", "interpolate_cached"
SIZES = [(3, 4), (9, 2), (3, 4), (6, 5), (1, 7), (8, 2)]
COORD = row_major(SIZES, 31)
REORDERED = COORD.clone()
REORDERED[0, :12] = REORDERED[0, :12].flip(0)
REORDERED[3] = REORDERED[3].roll(1, 0)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def added(to, add, shapes, coord=COORD, on_host=False, dtype=torch.float32, **options):
    """The tokens with tables of these ``shapes``, gradients, and a second derivative."""
    tables = [to(random(*shape, seed=shape[0])).requires_grad_() for shape in shapes]
    x = to(random(*coord.shape[:2], 8, dtype=dtype, seed=1)).requires_grad_()
    out = add(x * 1, *tables, coord if on_host else to(coord), **options)
    weight = to(random(*out.shape, dtype=dtype, seed=2)).requires_grad_()
    gradients = torch.autograd.grad(out, [x, *tables], weight, create_graph=True)
    total = sum(gradient.square().sum() for gradient in gradients)
    return [out, *gradients, *torch.autograd.grad(total, weight)]


learned = partial(added, add=fast.add_pos_embed_, shapes=[(6, 5, 8)])
factorized = partial(added, add=fast.add_factorized_pos_embed_, shapes=[(6, 8), (5, 8)])


def frozen(to):
    """A grid that comes again: what was kept of it is not compared on the device."""
    table = to(random(6, 5, 8))
    coord = to(COORD)
    x = to(torch.zeros(6, 31, 8))
    return [fast.add_pos_embed_(x * 1, table, coord) for _ in range(3)]


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
    # On a CPU too the formula for every token, as on all other devices: the same bits.
    found = batched_rope(read_rope(module), coord, torch.float32, traceable=coord.is_cpu)
    if kind != "mixed":
        return [found]
    tables = list(found)
    total = sum(table.square().sum() + table.sum() for table in tables)
    return [*tables, *torch.autograd.grad(total, module.freqs)]


def by_timms_methods(to, mode, kind):
    """Of batches of coordinates, and of plain images."""
    module = moved(small_vit(depth=0, pos_embed=kind).embeds, to)
    tables = [table for name, table in module.named_parameters() if "pos_embed" in name]
    out = to(random(6, 31, 32, seed=1)) * 1
    with running(mode):
        getattr(module, f"_apply_{kind}_naflex_pos_embed")(out, to(COORD))
        getattr(module, f"_apply_{kind}_pos_embed")(out, (1, 31))
    return [out, *torch.autograd.grad(out.square().mean(), tables)]


# What a CUDA graph that is being captured says of what it cannot hold.
OURS = "no CUDA graph can record"
# A case, how often the host waits for the device, and the error in a capture.
ON_CUDA = []
for add, strategy in [*product((learned, factorized), EXACT), (learned, "grid_sample")]:
    for options in ({}, {"coord": REORDERED}, {"ar_preserving": True}):
        ON_CUDA.append((partial(add, strategy=strategy, **options), 1, None))
for strategy in STRATEGY_NAMES:
    aligned = dict(mode="bilinear", antialias=False, align_corners=True)
    ON_CUDA.append((partial(learned, strategy=strategy, **aligned), 1, None))
for add, strategy, coord in product((learned, factorized), EXACT, (COORD, REORDERED)):
    ON_CUDA.append((partial(add, coord=coord, on_host=True, strategy=strategy), 0, OURS))
ON_CUDA += [
    (partial(learned, dtype=torch.bfloat16), 1, None),
    (partial(learned, dtype=torch.float64), 1, None),
    (partial(learned, coord=COORD.float(), strategy="grid_sample", mode="bilinear"), 1, None),
    (partial(learned, shapes=[(128, 2, 8)], antialias=False), 1, None),
    (frozen, 3, None),
    (partial(embeds, merge=2, sizes=((2, 4, 6), (1, 2, 2))), 0, OURS),
    (partial(embeds, merge=2, length=40, padding="first"), 0, OURS),
    (partial(embeds, merge=2, strategy="interpolate_cached"), 0, OURS),
    (partial(embeds, move_sizes=True), 1, OURS),
    (patch_kernel, 0, OURS),
    (partial(patch_kernel, mode="bilinear", dtype=torch.float64), 0, OURS),
    (partial(patch_kernel, dtype=torch.bfloat16, size=(8, 8)), 0, OURS),
]
for mode, kind in [*product(EXACT, ("learned", "factorized")), ("grid_sample", "learned")]:
    ON_CUDA.append((partial(by_timms_methods, mode=mode, kind=kind), 1, None))
for kind, times, options in product(CLASSES, (1, 20), ({}, {"ref_feat_shape": (4, 4)})):
    ON_CUDA.append((partial(rope, kind=kind, times=times, **options), 0, None))


@pytest.mark.parametrize(("case", "expected", "refused"), ON_CUDA)
def test_on_cuda_the_same_bits_and_no_wait_that_is_not_known(case, expected, refused, monkeypatch):
    want = case(lambda t: t.clone())
    with SecondDevice(monkeypatch):
        got = case(lambda t: t.to("cuda"))
        waits.clear()
        again = case(lambda t: t.to("cuda", non_blocking=True))
        assert len(waits) == expected, waits

        # What ran before runs in a capture, without a copy or a wait.
        monkeypatch.setattr(SecondDevice, "captures", True)
        if refused is None:
            captured = case(lambda t: OnDevice(t.clone()))[0].held
            rounding = max(2e-6, torch.finfo(captured.dtype).eps)
            assert relative(captured, want[0]) <= rounding
        else:
            with pytest.raises(RuntimeError, match=refused):
                case(lambda t: OnDevice(t.clone()))
    for ours, repeated, cpus in zip(got, again, want, strict=True):
        assert type(ours) is OnDevice
        assert ours.dtype == cpus.dtype
        assert torch.equal(ours.held, cpus)
        assert torch.equal(repeated.held, cpus)


# The same cases, but for float64 and coordinates on the host.
ON_METAL = []
for case, *_ in ON_CUDA:
    if "float64" not in str(case) and "on_host" not in str(case):
        ON_METAL.append(case)


@pytest.mark.parametrize("case", ON_METAL)
def test_on_metal_the_result_of_a_cpu_without_float64_and_embedding_bag(case, monkeypatch):
    want = case(lambda tensor: tensor)
    with SecondDevice(monkeypatch, "mps"):
        got = [tensor.held for tensor in case(lambda t: t.to("mps:0", non_blocking=True))]
    if "function added" in str(case):
        assert not waits
    rounding = 4e-6 if "factorized" in str(case) else 2e-6  # of two tables
    assert (got[0] - want[0]).abs().max() <= rounding * max(1.0, want[0].abs().max().item())
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1e-3)
