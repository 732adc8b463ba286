"""The Triton kernels of the matmul strategy's forward; ``triton.py`` launches them. The host reads nothing.

A *strip* is one line of a resized table before its columns are resized: row ``y`` of ``A_h . P``, (W0, C). Strips exist
for resized heights of at most ``STRIPS``, and only for the (height, row) that occur in the batch, one after another:
first those of height 1, then of height 2, ... ``heights`` (2, STRIPS) int32 holds how many rows of each height occur,
and how many samples in row-major order have that height. The table itself comes after the last place for a strip.

A resize matrix is kept as the *bands* of its rows: ``bands`` (rows,) int64 packs ``start << 32 | first << 16 | count``,
so that entry ``first + k`` of a row is ``weights[start + k]`` for k < count, and every other entry is 0. The matrices
of all lengths 1, 2, ... lie behind one another; row ``y`` of length ``n`` is row ``n * (n - 1) / 2 + y``.

The plan (B, PLAN) int32 says of each sample

    0  the count of tokens that get an embedding      5  taps along y of its tokens, 1 where it has strips
    1  the cells of its grid, h * w                   6  taps along x of its tokens
    2  w                                              7  tokens along x that see one cell of the table
    3  the resized height; 0: unknown, NaN            8  the sample's number
    4  the resized width

Sizes that change from batch to batch are not specialized on: Triton would compile in the middle of a training.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAN = tl.constexpr(9)
HUGE = tl.constexpr(2**14)  # longer than any length that has a matrix


@triton.jit
def _whole(at, live):
    """Coordinates as int32: -1 where negative, HUGE where not finite or larger than that, 0 where not ``live``."""
    value = tl.load(at, mask=live, other=0)
    if value.dtype.is_floating():
        value = value.to(tl.float64)
        value = tl.where(value == value, value, HUGE * 1.0)
        value = tl.minimum(tl.maximum(value, -1.0), HUGE * 1.0)
    else:  # cast first: what is below 0 or above 255 does not fit a uint8
        value = tl.minimum(tl.maximum(value.to(tl.int64), -1), HUGE)
    return value.to(tl.int32)


@triton.jit
def _strip(number, heights_ptr, STRIPS: tl.constexpr):
    """Which strip this is: its height - 1, its row, and the count of all strips."""
    height = tl.arange(0, STRIPS)
    rows = tl.load(heights_ptr + height)
    index = tl.sum((tl.cumsum(rows, 0) <= number).to(tl.int32), 0)
    return index, number - tl.sum(tl.where(height < index, rows, 0), 0), tl.sum(rows, 0)


@triton.jit(do_not_specialize=["N", "coord_b", "coord_n", "coord_c"])
def plan_kernel(
    coord_ptr,
    plan_ptr,
    key_ptr,
    heights_ptr,
    taps_y_ptr,
    taps_x_ptr,
    seen_x_ptr,
    N,
    coord_b,
    coord_n,
    coord_c,
    H0: tl.constexpr,
    W0: tl.constexpr,
    AR_PRESERVING: tl.constexpr,
    PADDING: tl.constexpr,
    LONGEST: tl.constexpr,
    STRIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sample: its row of the plan, its marks in ``heights`` (zeros before), and its sorting key.

    The key is the resized height, or STRIPS + 1 where the gradient must go token by token. ``taps_y``, ``taps_x`` and
    ``seen_x`` (LONGEST,) hold the largest count of a band, by length.
    """
    sample = tl.program_id(0).to(tl.int64)
    coord_ptr += sample * coord_b
    highest_y = tl.full([BLOCK], -1, tl.int32)
    highest_x = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        at = coord_ptr + n.to(tl.int64) * coord_n
        highest_y = tl.maximum(highest_y, tl.where(n < N, _whole(at, n < N), -1))
        highest_x = tl.maximum(highest_x, tl.where(n < N, _whole(at + coord_c, n < N), -1))
    h = tl.max(highest_y, 0) + 1
    w = tl.max(highest_x, 0) + 1
    cells = h * w
    to_h, to_w = h, w
    if AR_PRESERVING:
        as_is = (h == H0) & (w == W0)
        if PADDING:
            as_is = h < 0
        to_h = tl.where(as_is, h, tl.maximum(h, w))
        to_w = tl.where(as_is, w, tl.maximum(h, w))
    known = (cells > 0) & (to_h <= LONGEST) & (to_w <= LONGEST)
    tokens = N
    if not PADDING:
        tokens = tl.where(known, tl.minimum(cells, N), N)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        n = start + tl.arange(0, BLOCK)
        at = coord_ptr + n.to(tl.int64) * coord_n
        y = _whole(at, n < tokens)
        x = _whole(at + coord_c, n < tokens)
        want = tl.where(n < cells, n, 0)  # with PADDING tokens outside the grid take cell 0
        wrong += ((n < tokens) & ((y * w + x != want) | (x < 0))).to(tl.int32)
    has_strips = known & (to_h <= STRIPS)
    in_order = has_strips & (tl.sum(wrong, 0) == 0)
    tl.atomic_max(heights_ptr + to_h - 1, h, mask=has_strips)
    tl.atomic_add(heights_ptr + STRIPS + to_h - 1, 1, mask=in_order)
    tl.store(key_ptr + sample, tl.where(in_order, to_h, STRIPS + 1))
    plan_ptr += sample * PLAN
    tl.store(plan_ptr, tokens)
    tl.store(plan_ptr + 1, cells)
    tl.store(plan_ptr + 2, w)
    tl.store(plan_ptr + 3, tl.where(known, to_h, 0))
    tl.store(plan_ptr + 4, to_w)
    tl.store(plan_ptr + 5, tl.load(taps_y_ptr + to_h - 1, mask=known & (to_h > STRIPS), other=1))
    tl.store(plan_ptr + 6, tl.load(taps_x_ptr + to_w - 1, mask=known, other=0))
    tl.store(plan_ptr + 7, tl.load(seen_x_ptr + to_w - 1, mask=known, other=0))
    tl.store(plan_ptr + 8, sample.to(tl.int32))


@triton.jit(do_not_specialize=["most"])
def strips_kernel(
    strips_ptr,
    heights_ptr,
    bands_ptr,
    weights_ptr,
    most,
    width,
    STRIPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``strips`` (most + H0, W0 * C): from the table, in its last rows, every strip that occurs.

    Programs: (any number, blocks of a strip). All that run at one time share a block of the table's columns.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table_ptr = strips_ptr + most * width + at
    _, _, count = _strip(0, heights_ptr, STRIPS)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        index, y, _ = _strip(number, heights_ptr, STRIPS)
        band = tl.load(bands_ptr + index * (index + 1) // 2 + y)
        weights_at = weights_ptr + (band >> 32)
        first = ((band >> 16) & 0xFFFF).to(tl.int32)
        taps = (band & 0xFFFF).to(tl.int32)
        strip = tl.zeros([BLOCK], tl.float32)
        for start in range(0, taps, TAPS):
            for k in tl.static_range(TAPS):  # so many loads are on their way at once
                has = at < tl.where(taps > start + k, width, 0)
                weight = tl.load(weights_at + tl.minimum(start + k, taps - 1))
                strip += weight * tl.load(table_ptr + (first + start + k) * width, mask=has, other=0.0)
        tl.store(strips_ptr + number * width + at, strip, mask=at < width)


@triton.jit(do_not_specialize=["N", "splits", "most", "coord_b", "coord_n", "coord_c"])
def add_kernel(
    x_ptr,
    out_ptr,
    strips_ptr,
    coord_ptr,
    plan_ptr,
    heights_ptr,
    bands_y_ptr,
    weights_y_ptr,
    bands_x_ptr,
    weights_x_ptr,
    N,
    C,
    splits,
    most,
    x_b,
    x_n,
    x_c,
    out_b,
    out_n,
    out_c,
    coord_b,
    coord_n,
    coord_c,
    W0: tl.constexpr,
    COPY: tl.constexpr,
    STRIPS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``out = x + embedding``; tokens without an embedding are written only with COPY. ``out`` may be ``x``.

    Programs: (B * splits, any number for the blocks of CHANNELS). A token sums the few cells of its strip that it
    sees. A sample too high for strips sums rows of the table as well.
    """
    sample = (tl.program_id(0) // splits).to(tl.int64)
    x_ptr += sample * x_b
    out_ptr += sample * out_b
    coord_ptr += sample * coord_b
    plan_ptr += sample * PLAN
    tokens = tl.load(plan_ptr)
    to_h = tl.load(plan_ptr + 3)
    to_w = tl.load(plan_ptr + 4)
    taps_y = tl.load(plan_ptr + 5)
    taps_x = tl.load(plan_ptr + 6)
    high = tl.zeros([TOKENS], tl.int32) + to_h > STRIPS
    height = tl.arange(0, STRIPS)
    strip0 = tl.sum(tl.where(height + 1 < to_h, tl.load(heights_ptr + height), 0), 0)
    bands_y_ptr += to_h * (to_h - 1) // 2
    bands_x_ptr += to_w * (to_w - 1) // 2
    end = tokens
    if COPY:
        end = N
    for start in range(tl.program_id(0) % splits * TOKENS, end, splits * TOKENS):
        n = start + tl.arange(0, TOKENS)
        coord_at = coord_ptr + n.to(tl.int64) * coord_n
        y = _whole(coord_at, n < tokens)
        x = _whole(coord_at + coord_c, n < tokens)
        known = (n < tl.where(to_h > 0, tokens, 0)) & (y >= 0) & (x >= 0)
        band = tl.load(bands_x_ptr + x, mask=known, other=0)
        weights_x_at = weights_x_ptr + (band >> 32)
        first_x = ((band >> 16) & 0xFFFF).to(tl.int32)
        count_x = (band & 0xFFFF).to(tl.int32)
        band = tl.load(bands_y_ptr + y, mask=known & high, other=0)
        weights_y_at = weights_y_ptr + (band >> 32)
        row = tl.where(high, most + ((band >> 16) & 0xFFFF).to(tl.int32), strip0 + y)
        count_y = tl.where(high, (band & 0xFFFF).to(tl.int32), 1)
        # What is known of the tokens by now serves several blocks of channels.
        for c0 in range(tl.program_id(1) * CHANNELS, C, tl.num_programs(1) * CHANNELS):
            c = c0 + tl.arange(0, CHANNELS)
            in_c = c < C
            embedding = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for j in range(taps_y):
                weight_y = tl.load(weights_y_at + j, mask=known & high & (count_y > j), other=0.0)
                weight_y = tl.where(high, weight_y, 1.0)
                at = strips_ptr + (((row + j) * W0 + first_x) * C)[:, None] + c[None, :]
                for k0 in range(0, taps_x, TAPS):
                    for k in tl.static_range(TAPS):
                        seen = (count_x > k0 + k) & (count_y > j)
                        weight = weight_y * tl.load(weights_x_at + k0 + k, mask=seen, other=0.0)
                        cell = tl.load(at + (k0 + k) * C, mask=seen[:, None] & in_c[None, :], other=0.0)
                        embedding += weight[:, None] * cell
            embedding = tl.where(known[:, None], embedding, float("nan"))
            mask = (n < end)[:, None] & in_c[None, :]
            x_at = x_ptr + n.to(tl.int64)[:, None] * x_n + (c * x_c)[None, :]
            value = tl.load(x_at, mask=mask, other=0.0)
            # Rounded to the dtype of x before the addition, as timm does, and after it.
            total = (value.to(tl.float32) + embedding.to(value.dtype).to(tl.float32)).to(value.dtype)
            if COPY:
                total = tl.where((n < tokens)[:, None], total, value)
            out_at = out_ptr + n.to(tl.int64)[:, None] * out_n + (c * out_c)[None, :]
            tl.store(out_at, total, mask=mask)
