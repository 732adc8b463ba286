"""``resample_pos_embeds``: packed and padded embeddings from sizes, against one ``F.interpolate`` for each image."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Largest, relative, row_major

from timm_naflex_fast.backends import dispatch, portable
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds

MODES = ["bilinear", "bicubic"]
sides = st.integers(1, 12)


def one_by_one(table, sizes, *, mode, antialias=True, align_corners=False, ar_preserving=False, merge=1):
    """Each image's embeddings, (t*h*w, C) float64, by F.interpolate."""
    out = []
    for size in sizes:
        t, h, w = (1, *size) if len(size) == 2 else size
        grid = table.double()
        if (h, w) != tuple(table.shape[:2]):
            to = (max(h, w),) * 2 if ar_preserving else (h, w)
            how = dict(mode=mode, antialias=antialias, align_corners=align_corners)
            # At width 1 only timm's layout comes back right from PyTorch.
            grid = F.interpolate(grid[None].contiguous().permute(0, 3, 1, 2), size=to, **how)[0].permute(1, 2, 0)
            grid = grid[:h, :w]
        blocks = grid.reshape(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        out.append(blocks.reshape(h * w, -1).repeat(t, 1))
    return out


@settings(max_examples=150)
@given(
    st.tuples(sides, sides),
    st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from(["matmul", "interpolate_cached"]),
    st.sampled_from([None, "zeros", "first"]),
)
def test_equals_interpolate_with_gradients(size, grids, mode, antialias, corners, ar, merge, strategy, padding):
    grids = [(t, h * merge, w * merge) for t, h, w in grids]
    table = torch.randn(*size, 3, requires_grad=True)
    how = dict(mode=mode, antialias=antialias, align_corners=corners, ar_preserving=ar, merge=merge)
    want = one_by_one(table, grids, **how)
    if padding is not None:
        length = max(len(image) for image in want) + 2
        fill = [image[:1] if padding == "first" else image[:1] * 0 for image in want]
        want = [torch.cat([image, f.expand(length - len(image), -1)]) for image, f in zip(want, fill)]
        want, extra = torch.stack(want), dict(length=length, padding=padding)
    else:
        want, extra = torch.cat(want), {}
    got = resample_pos_embeds(table, torch.tensor(grids), strategy=strategy, **how, **extra)
    assert got.shape == want.shape and got.dtype == table.dtype
    assert (got - want).abs().max() <= 2e-6 * max(1.0, table.abs().max().item())
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want)]
    assert relative(*grads) <= 1e-5
    with torch.no_grad():
        for _ in range(3):  # kept tables too
            assert (resample_pos_embeds(table, grids, strategy=strategy, **how, **extra) - got).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_computed_in_float32_at_least_and_cast_once(dtype, mode):
    table = torch.randn(1, 16, 16, 64, dtype=dtype)
    want = torch.cat(one_by_one(table[0], [(7, 30), (16, 16), (5, 1)], mode=mode))
    got = resample_pos_embeds(table, [(7, 30), (16, 16), (5, 1)], mode=mode)
    assert got.dtype == dtype
    assert relative(got, want) <= max(torch.finfo(dtype).eps / 2, 1e-12) + 1e-6 * (dtype != torch.float64)


def test_linear_in_tokens_and_no_loop_over_images_in_the_backward():
    table, sizes = torch.randn(16, 16, 8, requires_grad=True), [(9, 28)] * 40
    with Largest() as largest:
        out = resample_pos_embeds(table, sizes, mode="bilinear")
    nodes, todo = 0, [out.grad_fn]
    while todo:
        node = todo.pop()
        nodes += 1
        todo += [n for n, _ in node.next_functions if n is not None]
    assert largest.elements <= 40 * 252 * 8 and nodes <= 4


def test_sizes_on_the_host_are_read_from_no_tensor(monkeypatch):
    def no_read(*args, **kwargs):
        raise AssertionError("read back")

    table = torch.randn(6, 5, 4)
    want = resample_pos_embeds(table, [(3, 4), (8, 2)], mode="bilinear")
    for read in ("tolist", "item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, read, no_read)
    got = resample_pos_embeds(table.clone(), ((3, 4), (8, 2)), mode="bilinear")
    monkeypatch.undo()
    assert torch.equal(got, want)


@pytest.fixture
def on_device(monkeypatch):
    """Let the CPU take the form that CUDA takes, with the portable one in the place of the kernels; its runs."""
    ran = []

    def add(*args):
        ran.append(tuple(args[0].shape))
        portable.add(*args)

    monkeypatch.setattr(dispatch, "_backend", lambda *_: SimpleNamespace(add=add))
    return ran


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("padding", [None, "zeros", "first"])
@pytest.mark.parametrize("frames", [1, 3])
def test_the_form_for_cuda_equals_interpolate_and_reads_no_tensor(on_device, monkeypatch, merge, padding, frames):
    sizes, table = [(frames, 4, 6), (1, 6, 8), (2, 2, 2)][: 2 + (frames > 1)], torch.randn(6, 5, 8, requires_grad=True)
    want = one_by_one(table, sizes, mode="bicubic", merge=merge)
    extra = {} if padding is None else dict(length=75, padding=padding)
    if padding is None:
        want = torch.cat(want)
    else:
        fill = [image[:1] if padding == "first" else image[:1] * 0 for image in want]
        want = torch.stack([torch.cat([i, f.expand(75 - len(i), -1)]) for i, f in zip(want, fill)])

    def no_read(*args, **kwargs):
        raise AssertionError("read back")

    for read in ("tolist", "item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, read, no_read)
    got = resample_pos_embeds(table, sizes, mode="bicubic", merge=merge, **extra)
    weight = torch.randn_like(got)
    (grad,) = torch.autograd.grad((got * weight).sum(), table)
    monkeypatch.undo()
    assert len(on_device) == 1 and got.shape == want.shape
    assert relative(got, want) <= 2e-6
    assert relative(grad, torch.autograd.grad((want * weight).sum(), table)[0]) <= 1e-5


def test_the_form_for_cuda_does_not_pad_small_images_to_a_video(on_device):
    table, sizes = torch.randn(6, 5, 8), [(16, 4, 4)] + [(1, 2, 2)] * 7
    got = resample_pos_embeds(table, sizes, mode="bilinear")
    assert relative(got, torch.cat(one_by_one(table, sizes, mode="bilinear"))) <= 2e-6 and not on_device
    add_pos_embed_(torch.zeros(2, 16, 8), table, grid_sizes=[(4, 4), (2, 2)])
    assert on_device == [(2, 16, 8)]


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
def test_add_pos_embed_takes_sizes_in_place_of_coordinates(strategy):
    sizes, x, table = [(3, 4), (9, 2), (6, 5)], torch.randn(3, 30, 4), torch.randn(6, 5, 4)
    want = add_pos_embed_(x.clone(), table, row_major(sizes), strategy=strategy, mode="bilinear")
    assert not torch.equal(want, x)
    for given_sizes in (sizes, torch.tensor(sizes)):
        assert torch.equal(
            add_pos_embed_(x.clone(), table, grid_sizes=given_sizes, strategy=strategy, mode="bilinear"), want
        )


TABLE = torch.randn(6, 5, 4)
SIZES = [(4, 4), (2, 6)]


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(merge=3), "merge must divide every height and width; 3 does not divide 4 x 4"),
        (dict(merge=0), "merge must be an integer of at least 1"),
        (dict(length=15), "image 0 has 16 tokens, length is 15"),
        (dict(grid_sizes=[(4, 0)]), "integers of at least 1"),
        (dict(grid_sizes=[(4, 4.0)]), "integers of at least 1"),
        (dict(grid_sizes=[(1, 2, 3, 4)]), r"shape \(B, 2\) or \(B, 3\)"),
        (dict(grid_sizes=torch.zeros(2)), r"shape \(B, 2\) or \(B, 3\)"),
        (dict(padding="last"), "'last' is not valid; valid: 'zeros', 'first'"),
        (dict(mode="nearest"), "valid: 'bilinear', 'bicubic'"),
        (dict(strategy="fast"), "valid: 'interpolate_cached', 'grid_sample', 'matmul'"),
        (dict(table=torch.randn(5, 4)), r"shape \(H0, W0, C\)"),
        (dict(table=torch.randn(2, 6, 5, 4)), r"shape \(H0, W0, C\)"),
        (dict(table=torch.zeros(6, 5, 4, dtype=torch.int64)), "floating point"),
    ],
)
def test_errors(change, message):
    arguments = dict(table=TABLE, grid_sizes=SIZES, mode="bilinear") | change
    with pytest.raises(ValueError, match=message):
        resample_pos_embeds(arguments.pop("table"), arguments.pop("grid_sizes"), **arguments)


def test_mode_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        resample_pos_embeds(TABLE, SIZES)


def test_errors_about_sizes_for_tokens_change_nothing():
    x = torch.zeros(2, 16, 4)
    for wrong, message in (([(4, 4)], "one size for each of the 2"), ([(4, 4), (9, 2)], "image 1 has 18 tokens")):
        with pytest.raises(ValueError, match=message):
            add_pos_embed_(x, TABLE, grid_sizes=wrong)
    for both in (dict(), dict(patch_coord=row_major([(4, 4)] * 2), grid_sizes=[(4, 4)] * 2)):
        with pytest.raises(ValueError, match="either patch_coord or grid_sizes"):
            add_pos_embed_(x, TABLE, **both)
    assert (x == 0).all()


def test_no_image_at_all():
    assert resample_pos_embeds(TABLE, [], mode="bilinear").shape == (0, 4)
    assert resample_pos_embeds(TABLE, torch.zeros(0, 2, dtype=torch.int64), mode="bilinear", length=5).shape == (
        0,
        5,
        4,
    )
