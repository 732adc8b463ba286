"""The eager CUDA path, with real numbers on a pretended device (``second_device``).

Each case runs once on the CPU and once with every tensor on the second device. The numbers are the
same bit for bit, no operator mixes the two devices, and each place where the host waits for the
device is known.
"""

from collections import Counter
from functools import partial

import pytest
import torch

from tests.support.moved import (
    COORD,
    SIZES,
    embeds,
    factorized,
    learned,
    patch_kernel,
    random,
    rope,
)
from tests.support.rotary import CLASSES
from tests.support.second_device import OnDevice, SecondDevice, waits
from timm_naflex_fast import functional as fast
from timm_naflex_fast.backends import dispatch
from timm_naflex_fast.batch.layout import Coordinates, OneGrid, Sizes
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.patch_embed.kernels import axis_inverse, resample_linear_kernel
from timm_naflex_fast.resampling import kept
from timm_naflex_fast.resampling.spec import ResizeSpec
from timm_naflex_fast.resampling.tables import PositionTable
from timm_naflex_fast.strategies import STRATEGIES

pytestmark = pytest.mark.usefixtures("clean")
REORDERED = COORD.clone()
REORDERED[0, :12] = REORDERED[0, :12].flip(0)
REORDERED[3] = REORDERED[3].roll(1, 0)

# Where the host waits for the device.
GRIDS = "batch/grids.py"
# What a CUDA graph that is being captured says of what it cannot hold: ours, and CUDA's own error.
NAMED_ERROR = "no CUDA graph can record"
CUDA_ERROR = "permitted when stream is capturing"


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


ON_DEVICE = [
    partial(add, strategy=strategy, **options)
    for add in (learned, factorized)
    for strategy in STRATEGY_NAMES
    for options in ({}, {"coord": REORDERED}, {"ar_preserving": True})
]
ON_DEVICE += [
    partial(learned, dtypes=(torch.float32, torch.bfloat16)),
    partial(learned, dtypes=(torch.float64, torch.float64)),
    partial(learned, coord=COORD.float()),
    partial(learned, coord=COORD.float(), strategy="grid_sample", mode="bilinear"),
]
ON_HOST = [
    partial(add, coord=coord, move_coord=False, strategy=strategy)
    for add in (learned, factorized)
    for strategy in ("matmul", "interpolate_cached")
    for coord in (COORD, REORDERED)
]
ON_HOST += [
    partial(embeds, merge=2),
    partial(embeds, merge=2, sizes=((2, 4, 6), (1, 2, 2))),
    partial(embeds, merge=2, length=40, padding="first"),
    partial(embeds, merge=2, strategy="interpolate_cached"),
]


@pytest.mark.parametrize("case", ON_DEVICE)
def test_coordinates_are_read_once(case, same_bits):
    same_bits(case, [GRIDS])


@pytest.mark.parametrize("case", ON_HOST)
def test_coordinates_and_sizes_of_the_host_are_not_waited_for(case, same_bits):
    same_bits(case, refused=NAMED_ERROR)


def test_a_grid_that_comes_again_is_not_compared_with_what_was_kept(same_bits):
    def frozen(to):
        table = to(random(6, 5, 8))
        coord = to(COORD)
        x = to(torch.zeros(6, 31, 8))
        return [fast.add_pos_embed_(x * 1, table, coord) for _ in range(3)]

    same_bits(frozen, [GRIDS] * 3)


def test_sizes_on_the_device_are_read_once(same_bits):
    same_bits(partial(embeds, move_sizes=True), ["batch/layout.py"], refused=NAMED_ERROR)


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
    table = PositionTable(tuple(to(random(*shape)) for shape in shapes))
    spec = ResizeSpec("bicubic", antialias)
    if len(shapes) == 2:
        spec = ResizeSpec("linear", antialias=False)
    how = where(to), spec, STRATEGIES["matmul"], context
    if tokens is None:
        return [dispatch.resample(table, *how)]
    x = to(random(6, tokens, 8))
    dispatch.add(x, table, *how)
    return [x]


def on_device(to):
    return Coordinates(to(COORD))


@pytest.mark.parametrize(
    ("where", "options"),
    [
        (on_device, {"shapes": ((6, 8), (5, 8))}),
        (on_device, {"shapes": ((128, 2, 8),), "antialias": False}),
        (lambda to: OneGrid(3, 4), {"tokens": 12}),
    ],
    ids=["factorized", "gathered", "images"],
)
def test_plain_operations_never_wait(where, options, same_bits):
    same_bits(partial(by_plain_operations, where=where, **options))


def test_what_plain_operations_would_copy_no_cuda_graph_records(same_bits):
    by_coord = partial(by_plain_operations, where=lambda to: Coordinates(COORD))
    same_bits(by_coord, ["backends/traceable.py"], NAMED_ERROR)

    def sizes(to):
        return Sizes(to(torch.tensor(SIZES)), length=31)

    same_bits(partial(by_plain_operations, where=sizes, tokens=None), refused=NAMED_ERROR)


@pytest.mark.parametrize("times", [1, 20], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("options", [{}, {"ref_feat_shape": (4, 4)}], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_rotary_embeddings_wait_where_they_are_learned(kind, options, times, same_bits):
    case = partial(rope, kind=kind, times=times, **options)
    if kind == "mixed":
        same_bits(case, ["rope/batched.py"], CUDA_ERROR)
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
