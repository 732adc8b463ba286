"""The eager CUDA path, with real numbers on a pretended device (``second_device``).

Each case runs once on the CPU and once with every tensor on the second device. The numbers are the
same bit for bit, no operator mixes the two devices, and each place where the host waits for the
device is known.
"""

from collections import Counter
from functools import partial

import pytest
import torch

from tests.support.oracles import row_major, seeded
from tests.support.rotary import CLASSES, build
from tests.support.second_device import OnDevice, SecondDevice, waits
from timm_naflex_fast import functional as fast
from timm_naflex_fast import tracing
from timm_naflex_fast.backends import dispatch
from timm_naflex_fast.batch.layout import Coordinates, OneGrid, Sizes
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.patch_embed.kernels import axis_inverse, resample_linear_kernel
from timm_naflex_fast.resampling import kept
from timm_naflex_fast.resampling.spec import ResizeSpec
from timm_naflex_fast.rope.batched import batched_rope
from timm_naflex_fast.rope.modules import read_rope
from timm_naflex_fast.strategies import STRATEGIES

pytestmark = pytest.mark.usefixtures("clean")
SIZES = [(3, 4), (9, 2), (3, 4), (6, 5), (1, 7)]
COORD = row_major(SIZES, 31)
REORDERED = COORD.clone()
REORDERED[0, :12] = REORDERED[0, :12].flip(0)
REORDERED[3] = REORDERED[3].roll(1, 0)

# Where the host waits for the device.
GRIDS = "batch/grids.py"
# What a CUDA graph that is being captured says of what it cannot hold: ours, and CUDA's own error.
NAMED_ERROR = "no CUDA graph can record"
CUDA_ERROR = "permitted when stream is capturing"


@pytest.fixture(autouse=True)
def plain_class(monkeypatch):
    """The package leaves subclasses of Tensor to PyTorch; here they stand for plain tensors."""
    monkeypatch.setattr(tracing, "OWN_MEMORY", (*tracing.OWN_MEMORY, OnDevice))


@pytest.fixture
def same_bits(monkeypatch):
    """A function that compares a case on both devices: a function of ``to``, which moves tensors.

    Args:
        waits_at: the files whose lines wait for the device, one for each time.
        refused: the error in a CUDA graph that is being captured; None: it can be recorded.
    """

    def compare(case, waits_at=(), refused=None):
        want = case(lambda t: t.clone())
        with monkeypatch.context() as patch, SecondDevice(patch):
            got = case(lambda t: t.to("cuda"))
            waits.clear()
            again = case(lambda t: t.to("cuda", non_blocking=True))
            found = Counter(line.split(":")[0] for line in waits.elements())

            # What ran before runs in a capture, without a copy or a wait.
            patch.setattr(SecondDevice, "captures", True)
            if refused is None:
                case(lambda t: OnDevice(t.clone()))
            else:
                with pytest.raises(RuntimeError, match=refused):
                    case(lambda t: OnDevice(t.clone()))
        for ours, repeated, cpus in zip(got, again, want, strict=True):
            assert type(ours) is OnDevice
            assert ours.dtype == cpus.dtype
            assert torch.equal(ours.held, cpus)
            assert torch.equal(repeated.held, cpus)
        assert found == Counter(waits_at)

    return compare


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def add_with_gradients(to, add, shapes, coord=COORD, dtypes=(torch.float32, torch.float32)):
    """``add`` tables of these ``shapes`` to tokens; results and gradients, with graphs of them.

    ``dtypes``: of the tables, and of the tokens.
    """
    table_dtype, dtype = dtypes
    tables = [to(random(*shape, dtype=table_dtype, seed=shape[0])) for shape in shapes]
    x = to(random(*coord.shape[:2], 8, dtype=dtype, seed=1))
    inputs = [tensor.requires_grad_() for tensor in (x, *tables)]
    out = add(x * 1, *tables)
    weight = to(random(*out.shape, dtype=dtype, seed=2))
    return [out, *torch.autograd.grad(out, inputs, weight)]


def learned(to, coord=COORD, move_coord=True, dtypes=(torch.float32, torch.float32), **options):
    where = to(coord) if move_coord else coord
    add = lambda x, table: fast.add_pos_embed_(x, table, where, **options)
    return add_with_gradients(to, add, [(6, 5, 8)], coord, dtypes)


def factorized(to, coord=COORD, move_coord=True, **options):
    where = to(coord) if move_coord else coord
    add = lambda x, y, x_table: fast.add_factorized_pos_embed_(x, y, x_table, where, **options)
    return add_with_gradients(to, add, [(6, 8), (5, 8)], coord)


ADDS = pytest.mark.parametrize("add", [learned, factorized])


@ADDS
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"coord": REORDERED}, {"ar_preserving": True}], ids=["", "reordered", "square"]
)
def test_coordinates_are_read_once(add, strategy, options, same_bits):
    same_bits(partial(add, strategy=strategy, **options), [GRIDS])


@pytest.mark.parametrize(
    "options",
    [
        {"dtypes": (torch.float32, torch.bfloat16)},
        {"dtypes": (torch.float64, torch.float64)},
        {"coord": COORD.float()},
        {"coord": COORD.float(), "strategy": "grid_sample", "mode": "bilinear"},
    ],
    ids=["bfloat16 tokens", "float64", "float coordinates", "float coordinates, grid_sample"],
)
def test_other_dtypes(options, same_bits):
    same_bits(partial(learned, **options), [GRIDS])


@ADDS
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("coord", [COORD, REORDERED], ids=["", "reordered"])
def test_coordinates_of_the_host_are_not_waited_for(add, strategy, coord, same_bits):
    case = partial(add, coord=coord, move_coord=False, strategy=strategy)
    same_bits(case, refused=NAMED_ERROR)


def second_derivatives(to, coord, move_coord=True, **options):
    table = to(random(6, 5, 8)).requires_grad_()
    where = to(coord) if move_coord else coord
    out = fast.add_pos_embed_(to(torch.zeros(5, 31, 8)), table, where, **options)
    weight = to(random(*out.shape, seed=2)).requires_grad_()
    (gradient,) = torch.autograd.grad(out, table, weight, create_graph=True)
    return [out, gradient, *torch.autograd.grad(gradient.square().sum(), weight)]


def test_second_derivatives(same_bits):
    same_bits(partial(second_derivatives, coord=REORDERED), [GRIDS])
    same_bits(partial(second_derivatives, coord=COORD, strategy="grid_sample"), [GRIDS])
    on_host = partial(second_derivatives, coord=REORDERED, move_coord=False)
    same_bits(on_host, refused=NAMED_ERROR)


def test_a_grid_that_comes_again_is_not_compared_with_what_was_kept(same_bits):
    def frozen(to):
        table = to(random(6, 5, 8))
        coord = to(COORD)
        x = to(torch.zeros(5, 31, 8))
        return [fast.add_pos_embed_(x * 1, table, coord) for _ in range(3)]

    same_bits(frozen, [GRIDS] * 3)


def embeds(to, sizes=((4, 6), (2, 2), (8, 4)), move_sizes=False, **options):
    table = to(random(6, 5, 8)).requires_grad_()
    if move_sizes:
        sizes = to(torch.tensor(sizes))
    out = fast.resample_pos_embeds(table, sizes, mode="bilinear", **options)
    return [out, *torch.autograd.grad(out.square().sum(), table)]


@pytest.mark.parametrize(
    "options",
    [
        {"merge": 2},
        {"merge": 2, "sizes": ((2, 4, 6), (1, 2, 2))},
        {"merge": 2, "length": 40, "padding": "first"},
        {"merge": 2, "strategy": "interpolate_cached"},
    ],
    ids=str,
)
def test_sizes_of_the_host_are_not_waited_for(options, same_bits):
    same_bits(partial(embeds, **options), refused=NAMED_ERROR)


def test_sizes_on_the_device_are_read_once(same_bits):
    same_bits(partial(embeds, move_sizes=True), ["batch/layout.py"], refused=NAMED_ERROR)


def patch_kernel(to, mode="bicubic", dtype=torch.float32, size=(9, 14)):
    weight = to(random(12, 3, 16, 16, dtype=dtype)).requires_grad_()
    out = fast.resample_patch_kernel(weight, size, mode=mode)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    return [out, grad, *torch.autograd.grad(grad.square().sum(), weight)]


def linear_patch_kernel(to):
    how = dict(in_chans=3, channels_last=True, mode="bicubic", antialias=True)
    return [resample_linear_kernel(to(random(6, 192)), (8, 8), (9, 7), **how)]


def inverses_in_a_graph(to):
    device = to(COORD).device
    return [axis_inverse(n, 16, "bicubic", True, device) for n in (9, 25)]


@pytest.mark.parametrize(
    "case",
    [
        patch_kernel,
        partial(patch_kernel, mode="bilinear", dtype=torch.float64),
        partial(patch_kernel, dtype=torch.bfloat16, size=(8, 8)),
        linear_patch_kernel,
        inverses_in_a_graph,
    ],
)
def test_patch_kernels_never_wait(case, same_bits):
    same_bits(case)


def by_plain_operations(to, where, shapes=((6, 5, 8),), antialias=True, tokens=31):
    """What a graph holds: ``where`` says how the tokens are told their cells.

    ``tokens`` None: embeddings by themselves.
    """
    context = "capture" if SecondDevice.captures else "export"
    how = where(to), ResizeSpec("bicubic", antialias), STRATEGIES["matmul"], context
    tables = tuple(to(random(*shape)) for shape in shapes)
    if tokens is None:
        return [dispatch.resample(*tables, *how)]
    x = to(random(5, tokens, 8))
    dispatch.add(x, tables, *how)
    return [x]


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": ((6, 8), (5, 8))},
        {"shapes": ((128, 2, 8),), "antialias": False},
        {"where": lambda to: OneGrid(3, 4), "tokens": 12},
    ],
    ids=["factorized", "gathered", "images"],
)
def test_plain_operations_never_wait(options, same_bits):
    on_device = {"where": lambda to: Coordinates(to(COORD))}
    same_bits(partial(by_plain_operations, **(on_device | options)))


def test_plain_operations_with_what_is_on_the_host(same_bits):
    by_coord = partial(by_plain_operations, where=lambda to: Coordinates(COORD))
    same_bits(by_coord, ["backends/traceable.py"], NAMED_ERROR)


def test_embeddings_for_sizes_on_the_device_by_plain_operations(same_bits):
    where = lambda to: Sizes(to(torch.tensor(SIZES)), length=31)
    case = partial(by_plain_operations, where=where, tokens=None)
    same_bits(case, refused=NAMED_ERROR)


def rope(to, kind, times, **options):
    torch.manual_seed(0)
    module = build(kind, **options).train()
    for name, value in module._parameters.items():
        module._parameters[name] = torch.nn.Parameter(to(value.detach()))
    for name, value in module._buffers.items():
        module._buffers[name] = value if value is None else to(value)
    torch.manual_seed(1)
    found = batched_rope(read_rope(module), to(COORD.repeat(times, 1, 1)), torch.float32)
    if kind != "mixed":
        return [found]
    tables = list(found)
    total = sum(table.square().sum() + table.sum() for table in tables)
    return [*tables, *torch.autograd.grad(total, module.freqs)]


TIMES = pytest.mark.parametrize("times", [1, 20], ids=["few tokens", "many tokens"])


@TIMES
@pytest.mark.parametrize("options", [{}, {"ref_feat_shape": (4, 4)}], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_rotary_embeddings_wait_where_they_are_learned(kind, options, times, same_bits):
    case = partial(rope, kind=kind, times=times, **options)
    if kind == "mixed":
        same_bits(case, [GRIDS], CUDA_ERROR)
    else:
        same_bits(case)


def test_what_a_cuda_graph_reads_of_patch_kernels_stays_in_memory(monkeypatch):
    monkeypatch.setattr(kept, "_pinned", {})
    with SecondDevice(monkeypatch):
        weight = OnDevice(random(2, 3, 6, 6))
        monkeypatch.setattr(SecondDevice, "captures", True)
        with pytest.raises(RuntimeError, match="run the model once before you capture"):
            fast.resample_patch_kernel(weight, (4, 5))
        monkeypatch.setattr(SecondDevice, "captures", False)
        fast.resample_patch_kernel(weight, (4, 5))
        assert not kept._pinned
        monkeypatch.setattr(SecondDevice, "captures", True)
        fast.resample_patch_kernel(weight, (4, 5))
    ((rows, columns),) = kept._pinned.values()
    assert rows.shape == (4, 6)
    assert columns.shape == (6, 5)


def test_the_second_device_refuses_what_a_gpu_refuses(monkeypatch):
    with SecondDevice(monkeypatch):
        x = torch.zeros(3, 4, device="cuda")
        row = torch.ones(4)
        index = torch.tensor([0, 2])
        for mixed in (
            lambda: x + row,
            lambda: x.index_add_(0, index, x[:2]),
            lambda: torch.stack([x[0], row]),
        ):
            with pytest.raises(RuntimeError, match="takes a tensor of the CPU"):
                mixed()

        waits.clear()
        x += torch.tensor(1.0)  # a number, as on a GPU
        x.copy_(torch.ones(3, 4), non_blocking=True)
        assert not waits

        for read in (
            x.sum().item,
            x.cpu,
            x.tolist,
            lambda: x[x > 0],
            lambda: x[index],
            lambda: torch.equal(x, x),
        ):
            read()
        assert waits.total() == 6
