"""The eager CUDA path, with real numbers on a pretended device (``second_device``), against the
CPU.

Each case runs once on the CPU and once with every tensor on the second device. The numbers are the
same bit for bit, no operator mixes the two devices, and each place where the host waits for the
device is known: ``WAITS``.
"""

from collections import Counter
from functools import partial

import pytest
import torch

from tests.support.oracles import row_major
from tests.support.rotary import AUGMENTED, CLASSES, build
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


@pytest.fixture(autouse=True)
def plain_class(monkeypatch):
    """The package leaves subclasses of Tensor to PyTorch; here they stand for plain tensors."""
    monkeypatch.setattr(tracing, "OWN_MEMORY", (*tracing.OWN_MEMORY, OnDevice))


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def learned(
    to, coord=COORD, dtype=torch.float32, x_dtype=torch.float32, twice=False, stays=False, **options
):
    add, *shapes = options.pop("add", (fast.add_pos_embed_, (6, 5, 8)))
    tables = [to(random(*shape, dtype=dtype, seed=shape[0])).requires_grad_() for shape in shapes]
    x = to(random(*coord.shape[:2], 8, dtype=x_dtype, seed=1)).requires_grad_()
    out = add(x * 1, *tables, coord if stays else to(coord), **options)
    weight = to(random(*out.shape, dtype=x_dtype, seed=2)).requires_grad_()
    grads = torch.autograd.grad(out, [x, *tables], weight, create_graph=twice)
    more = torch.autograd.grad(grads[1].square().sum(), weight) if twice else ()
    return [out, *grads, *more]


def frozen(to):
    table, coord = to(random(6, 5, 8)), to(COORD)
    return [
        fast.add_pos_embed_(to(torch.zeros(*COORD.shape[:2], 8)), table, coord) for _ in range(3)
    ]


factorized = partial(learned, add=(fast.add_factorized_pos_embed_, (6, 8), (5, 8)))


def by_sizes(to, sizes=((4, 6), (2, 2), (8, 4)), tensor=False, **options):
    table = to(random(6, 5, 8)).requires_grad_()
    out = fast.resample_pos_embeds(
        table, to(torch.tensor(sizes)) if tensor else sizes, mode="bilinear", **options
    )
    return [out, *torch.autograd.grad(out.square().sum(), table)]


def patch_kernel(to, mode="bicubic", dtype=torch.float32, size=(9, 14)):
    weight = to(random(12, 3, 16, 16, dtype=dtype)).requires_grad_()
    out = fast.resample_patch_kernel(weight, size, mode=mode)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    return [out, grad, *torch.autograd.grad(grad.square().sum(), weight)]


def in_graph(to, where, shapes=((6, 5, 8),), antialias=True, resamples=False):
    """By plain operations."""
    how = (
        ResizeSpec("bicubic", antialias),
        STRATEGIES["matmul"],
        "capture" if SecondDevice.captures else "export",
    )
    tables, where = tuple(to(random(*shape)) for shape in shapes), where(to)
    if resamples:
        return [dispatch.resample(*tables, where, *how)]
    x = to(random(5, 12 if isinstance(where, OneGrid) else 31, 8))
    dispatch.add(x, tables, where, *how)
    return [x]


def rope(to, kind, times, **options):
    torch.manual_seed(0)
    module = build(kind, **options).train()
    for name, value in module._parameters.items():
        module._parameters[name] = torch.nn.Parameter(to(value.detach()))
    for name, value in module._buffers.items():
        module._buffers[name] = value if value is None else to(value)
    torch.manual_seed(1)
    found = batched_rope(read_rope(module), to(COORD.repeat(times, 1, 1)), torch.float32)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    if kind == "mixed":
        found += torch.autograd.grad(sum(t.square().sum() + t.sum() for t in found), module.freqs)
    return found


HOW = ("bicubic", True)  # interpolation, antialias
VARIANTS = {
    "": {},
    ", reordered": dict(coord=REORDERED),
    ", ar_preserving": dict(ar_preserving=True),
}
CASES = {
    f"{kind}, {strategy}{variant}": partial(make, strategy=strategy, **options)
    for kind, make in (("learned", learned), ("factorized", factorized))
    for strategy in STRATEGY_NAMES
    for variant, options in VARIANTS.items()
}
CASES |= {
    "learned, bfloat16 tokens": partial(learned, x_dtype=torch.bfloat16),
    "learned, float64": partial(learned, dtype=torch.float64, x_dtype=torch.float64),
    "learned, second derivatives": partial(learned, coord=REORDERED, twice=True),
    "learned, float coordinates": partial(learned, coord=COORD.float()),
    "learned, grid_sample, float": partial(
        learned, coord=COORD.float(), strategy="grid_sample", mode="bilinear"
    ),
    "learned, grid_sample, second derivatives": partial(
        learned, strategy="grid_sample", twice=True
    ),
    "frozen": frozen,  # a grid comes again: nothing is compared with what was kept, which would wait once more
    "host coordinates": partial(learned, stays=True),
    "host coordinates, reordered": partial(learned, coord=REORDERED, stays=True),
    "host coordinates, interpolate_cached": partial(
        learned, stays=True, strategy="interpolate_cached"
    ),
    "host coordinates, factorized": partial(factorized, stays=True),
    "host coordinates, second derivatives": partial(
        learned, coord=REORDERED, twice=True, stays=True
    ),
    "packed, merge": partial(by_sizes, merge=2),
    "packed, frames, merge": partial(by_sizes, sizes=((2, 4, 6), (1, 2, 2)), merge=2),
    "padded, merge": partial(by_sizes, merge=2, length=40, padding="first"),
    "packed, sizes on the device": partial(by_sizes, tensor=True),
    "packed, interpolate_cached, merge": partial(by_sizes, merge=2, strategy="interpolate_cached"),
    "patch kernel": patch_kernel,
    "patch kernel, bilinear, float64": partial(patch_kernel, mode="bilinear", dtype=torch.float64),
    "patch kernel, bfloat16": partial(patch_kernel, dtype=torch.bfloat16, size=(8, 8)),
    "patch kernel, linear": lambda to: [
        resample_linear_kernel(to(random(6, 192)), (8, 8), (9, 7), 3, True, *HOW)
    ],
    "patch kernel, in a graph": lambda to: [
        axis_inverse(n, 16, "bicubic", True, to(COORD).device) for n in (9, 25)
    ],
    "graph, host coordinates": partial(in_graph, where=lambda to: Coordinates(COORD)),
    "graph, factorized": partial(
        in_graph, where=lambda to: Coordinates(to(COORD)), shapes=((6, 8), (5, 8))
    ),
    "graph, gathered": partial(
        in_graph, where=lambda to: Coordinates(to(COORD)), shapes=((128, 2, 8),), antialias=False
    ),
    "graph, images": partial(in_graph, where=lambda to: OneGrid(3, 4)),
    "graph, sizes": partial(in_graph, where=lambda to: Sizes(torch.tensor(SIZES))),
    "graph, padded": partial(
        in_graph, where=lambda to: Sizes(to(torch.tensor(SIZES)), length=31), resamples=True
    ),
}
UNCHANGED = {"": {}, ", reference size": dict(ref_feat_shape=(4, 4))}
ALL = dict(shift_coords=0.2, jitter_coords=1.3, rescale_coords=1.7)
CHANGES = {f", {name}": {name: value} for name, value in ALL.items()} | {", all changes": ALL}
CASES |= {
    f"rope, {kind}{name}{', many tokens' * (times > 1)}": partial(
        rope, kind=kind, times=times, **options
    )
    for kind in CLASSES
    for name, options in (UNCHANGED | (CHANGES if kind in AUGMENTED else {})).items()
    for times in (1, 20)
}
# Where the host waits for the device, by the first words of a case; everything else never waits.
READS_GRIDS = {"batch/grids.py": 1}
WAITS = dict.fromkeys(("learned", "factorized", "rope, mixed"), READS_GRIDS)
WAITS |= {"packed, sizes on the device": {"batch/layout.py": 1}}
WAITS |= {"frozen": {"batch/grids.py": 3}, "graph, host coordinates": {"backends/traceable.py": 1}}
WAITS |= {"graph, sizes": {"batch/layout.py": 1}}
WAITS |= {f"rope, {kind}{name}": READS_GRIDS for kind in AUGMENTED for name in CHANGES}


@pytest.mark.parametrize("name", CASES)
def test_a_second_device_gives_the_cpus_bits(name, monkeypatch):
    want = CASES[name](lambda t: t.clone())
    with SecondDevice(monkeypatch):
        got = CASES[name](lambda t: t.to("cuda"))
        waits.clear()
        again = CASES[name](lambda t: t.to("cuda", non_blocking=True))
        found = Counter(line.split(":")[0] for line in waits.elements())
        # What was run before runs in a capture without a copy or a wait; or an error says that it
        # cannot.
        monkeypatch.setattr(SecondDevice, "captures", True)
        try:
            CASES[name](lambda t: OnDevice(t.clone()))
        except RuntimeError as error:  # rotary embeddings that read the grids leave it to CUDA
            refused = (
                "permitted when stream is capturing"
                if name.startswith("rope")
                else "no CUDA graph can record"
            )
            assert refused in str(error)
        else:
            assert "host" not in name
    for a, b, c in zip(got, want, again, strict=True):
        assert (
            type(a) is OnDevice
            and a.dtype == b.dtype
            and torch.equal(a.held, c.held)
            and torch.equal(a.held, b)
        )
    assert found == WAITS.get(max(filter(name.startswith, WAITS), key=len, default=""), {})


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
        x, row, index = torch.zeros(3, 4, device="cuda"), torch.ones(4), torch.tensor([0, 2])
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
