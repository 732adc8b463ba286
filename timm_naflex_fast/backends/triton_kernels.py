"""The Triton kernels of the matmul strategy, forward and gradient; ``triton.py`` launches them. The host reads nothing.

A *strip* is one line of a resized table before its columns are resized: row ``y`` of ``A_h . P``, (W0, C). Strips exist
for resized heights of at most ``STRIPS``, and only for the (height, row) that occur in the batch, one after another:
first those of height 1, then of height 2, ... ``heights`` (2, STRIPS) int32 holds how many rows of each height occur,
and how many samples in row-major order have that height.

A resize matrix is kept as the *bands* of its rows. A band (int64) packs ``widest << 52 | start << 24 | first << 12 |
count``: entry ``first + k`` of the row is ``weights[start + k]`` for k < count, and every other entry is 0. ``widest``
is the largest count of that matrix. The matrices of all lengths 1, 2, ... lie behind one another: row ``y`` of ``A_n``
is band ``n * (n - 1) / 2 + y``, and row ``cell`` of ``A_n^T`` (``seen``) is band ``(n - 1) * N0 + cell``.

``cells`` (B, N) int32 holds the coordinates of each token as ``y << 16 | x``, -1 where they name no cell. The plan
(B, PLAN) int32 says of each sample

    0  the resized height; STRIPS + 1 where the gradient goes token by token (in another order, or higher than STRIPS)
    1  the count of tokens that get an embedding      4  the resized height
    2  the count of tokens in the grid                5  the resized width
    3  the width of the grid                          6  the number of the sample

Gradients take no atomics: a program owns what it writes and adds in one order, so that results never vary by a bit.
Sizes that change from batch to batch are not specialized on: Triton would compile in the middle of a training.
"""

from __future__ import annotations

import triton
import triton.language as tl

STRIPS = tl.constexpr(64)  # the largest resized height that has strips
PLAN = tl.constexpr(7)
HUGE = tl.constexpr(2**14)  # longer than any length that has a matrix
BLOCK = tl.constexpr(1024)
# So many tokens, channels and columns of the table are handled at a time.
TOKENS = tl.constexpr(32)
CHANNELS = tl.constexpr(64)
COLUMNS = tl.constexpr(16)  # the least side of a product; 32 would take three times the registers


@triton.jit
def _whole(at, live):
    """Coordinates as int32: -1 where negative or not live, HUGE where larger than that."""
    return tl.minimum(tl.maximum(tl.load(at, mask=live, other=-1), -1), HUGE).to(tl.int32)


@triton.jit
def _band(bands, weights, row, live):
    """Of a row of a matrix: where its weights begin, its first column, and the count of its columns."""
    band = tl.load(bands + row, mask=live, other=0)
    weights_at = weights + ((band >> 24) & 0xFFFFFFF)
    return weights_at, ((band >> 12) & 0xFFF).to(tl.int32), (band & 0xFFF).to(tl.int32)


@triton.jit
def _widest(bands, row):
    """The largest count of a band in the matrix that holds this row."""
    return (tl.load(bands + row) >> 52).to(tl.int32)


@triton.jit
def _strip(number, heights):
    """Which strip this is: its height - 1, its row, and the count of all strips."""
    height = tl.arange(0, STRIPS)
    rows = tl.load(heights + height)
    index = tl.sum((tl.cumsum(rows, 0) <= number).to(tl.int32), 0)
    return index, number - tl.sum(tl.where(height < index, rows, 0), 0), tl.sum(rows, 0)


@triton.jit
def _add_lines(total, source, width, live, weights_at, count):
    """``total`` plus ``count`` lines that lie ``width`` apart, each times its weight."""
    taps = tl.where(live, count, 0)
    for start in range(0, count, 4):
        for k in tl.static_range(4):  # so many loads are on their way at once
            weight = tl.load(weights_at + tl.minimum(start + k, count - 1))
            total += weight * tl.load(source + (start + k) * width, mask=taps > start + k, other=0.0)
    return total


@triton.jit(do_not_specialize=["N"])
def plan_kernel(coord, cells, plan, heights, N, H0, W0, LONGEST, AR_PRESERVING: tl.constexpr, PADDING: tl.constexpr):
    """One program per sample: its cells, its row of the plan, and its marks in ``heights`` (zeros before)."""
    sample = tl.program_id(0).to(tl.int64)
    coord += sample * N * 2
    highest_y = tl.full([BLOCK], -1, tl.int32)
    highest_x = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        highest_y = tl.maximum(highest_y, _whole(coord + n * 2, n < N))
        highest_x = tl.maximum(highest_x, _whole(coord + n * 2 + 1, n < N))
    h = tl.max(highest_y, 0) + 1
    w = tl.max(highest_x, 0) + 1
    as_is = ((h == H0) & (w == W0)) | (not AR_PRESERVING)
    to_h = tl.where(as_is, h, tl.maximum(h, w))
    to_w = tl.where(as_is, w, tl.maximum(h, w))
    known = (h > 0) & (w > 0) & (to_h <= LONGEST) & (to_w <= LONGEST)
    in_grid = tl.minimum(h * w, N)
    tokens = N if PADDING else tl.where(known, in_grid, N)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        n = start + tl.arange(0, BLOCK)
        y = _whole(coord + n * 2, n < tokens)
        x = _whole(coord + n * 2 + 1, n < tokens)
        named = known & (y >= 0) & (x >= 0)
        want = tl.where(n < in_grid, n, 0)  # with PADDING tokens outside the grid take cell 0
        wrong += ((n < tokens) & ((y * w + x != want) | (x < 0))).to(tl.int32)
        tl.store(cells + sample * N + n, tl.where(named, y << 16 | x, -1), mask=n < tokens)
    has_strips = known & (to_h <= STRIPS)
    in_order = has_strips & (tl.sum(wrong, 0) == 0)
    tl.atomic_max(heights + to_h - 1, h, mask=has_strips)
    tl.atomic_add(heights + STRIPS + to_h - 1, 1, mask=in_order)
    plan += sample * PLAN
    tl.store(plan, tl.where(in_order, to_h, STRIPS + 1))
    tl.store(plan + 1, tokens)
    tl.store(plan + 2, in_grid)
    tl.store(plan + 3, w)
    tl.store(plan + 4, tl.where(known, to_h, 1))
    tl.store(plan + 5, tl.where(known, to_w, 1))
    tl.store(plan + 6, sample.to(tl.int32))


@triton.jit
def strips_kernel(table, strips, heights, bands, weights, width):
    """Every strip that occurs, from the rows of the table, W0 * C = ``width``.

    Programs: (any number, blocks of a strip). All that run at one time share a block of the table's columns.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, _, count = _strip(0, heights)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        index, y, _ = _strip(number, heights)
        weights_at, first, taps = _band(bands, weights, index * (index + 1) // 2 + y, y >= 0)
        source = table + first * width + at
        strip = _add_lines(tl.zeros([BLOCK], tl.float32), source, width, at < width, weights_at, taps)
        tl.store(strips + number * width + at, strip, mask=at < width)


@triton.jit(do_not_specialize=["N"])
def add_kernel(
    x, out, table, strips, cells, plan, heights, bands_y, bands_x, weights, N, C, W0: tl.constexpr, COPY: tl.constexpr
):
    """``out = x + embedding``; tokens without an embedding are written only with COPY. ``out`` may be ``x``.

    Programs: (B * blocks of TOKENS, any number for the blocks of CHANNELS). A token sums the few cells of its strip
    that it sees. A sample too high for strips sums rows of the table as well.
    """
    blocks = tl.cdiv(N, TOKENS)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    x += sample * N * C
    out += sample * N * C
    plan += sample * PLAN
    tokens = tl.load(plan + 1)
    end = N if COPY else tokens
    n = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) % blocks * TOKENS >= end:
        return
    to_h = tl.load(plan + 4)
    to_w = tl.load(plan + 5)
    high = to_h > STRIPS
    height = tl.arange(0, STRIPS)
    strip0 = tl.sum(tl.where(height + 1 < to_h, tl.load(heights + height), 0), 0)
    cell = tl.load(cells + sample * N + n, mask=n < tokens, other=-1)
    band_x = to_w * (to_w - 1) // 2
    weights_x_at, first_x, count_x = _band(bands_x, weights, band_x + (cell & 0xFFFF), cell >= 0)
    band_y = to_h * (to_h - 1) // 2
    weights_y_at, first_y, count_y = _band(bands_y, weights, band_y + (cell >> 16), tl.where(high, cell, -1) >= 0)
    lines = tl.where(high, count_y, 1)
    first = (tl.where(high, first_y, strip0 + (cell >> 16)) * W0 + first_x) * C
    source = strips
    if high:
        source = table
    taps_x = _widest(bands_x, band_x)
    taps_y = tl.where(high, _widest(bands_y, band_y), 1)
    # What is known of the tokens by now serves several blocks of channels.
    for c0 in range(tl.program_id(1) * CHANNELS, C, tl.num_programs(1) * CHANNELS):
        c = c0 + tl.arange(0, CHANNELS)
        in_c = c < C
        embedding = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for j in range(taps_y):
            weight_y = tl.load(weights_y_at + j, mask=count_y > j, other=1.0)
            at = source + (first + j * W0 * C)[:, None] + c[None, :]
            for k0 in range(0, taps_x, 2):
                for k in tl.static_range(2):
                    sees = (count_x > k0 + k) & (lines > j)
                    weight = weight_y * tl.load(weights_x_at + k0 + k, mask=sees, other=0.0)
                    line = tl.load(at + (k0 + k) * C, mask=sees[:, None] & in_c[None, :], other=0.0)
                    embedding += weight[:, None] * line
        embedding = tl.where((cell >= 0)[:, None], embedding, float("nan"))
        mask = (n < end)[:, None] & in_c[None, :]
        x_at = (n * C)[:, None] + c[None, :]
        value = tl.load(x + x_at, mask=mask, other=0.0)
        # Rounded to the dtype of x before the addition, as timm does, and after it.
        total = (value.to(tl.float32) + embedding.to(value.dtype).to(tl.float32)).to(value.dtype)
        if COPY:
            total = tl.where((n < tokens)[:, None], total, value)
        tl.store(out + x_at, total, mask=mask)


@triton.jit(do_not_specialize=["N"])
def strips_grad_kernel(g, strips, plan, heights, seen, weights, N, C, W0: tl.constexpr, PADDING: tl.constexpr):
    """The gradient of every strip: a cell sums the few tokens that see it, over all samples of the strip's height.

    Programs: (any number, blocks of CHANNELS). The plan comes sorted by its first column.
    """
    CELLS: tl.constexpr = 16 if W0 <= 16 else 32
    blocks = tl.cdiv(W0, CELLS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_c = c < C
    height = tl.arange(0, STRIPS)
    samples = tl.load(heights + STRIPS + height)
    _, _, count = _strip(0, heights)
    for work in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        number = work // blocks
        cell = work % blocks * CELLS + tl.arange(0, CELLS)
        index, y, _ = _strip(number, heights)
        begin = tl.sum(tl.where(height < index, samples, 0), 0)
        grad = tl.zeros([CELLS, CHANNELS], tl.float32)
        for k in range(begin, begin + tl.load(heights + STRIPS + index)):
            at = plan + k * PLAN
            in_grid = tl.load(at + 2)
            w = tl.load(at + 3)
            seen_row = (tl.load(at + 5) - 1) * W0
            sample_at = g + tl.load(at + 6).to(tl.int64) * N * C + c[None, :]
            weights_at, first, tokens = _band(seen, weights, seen_row + cell, cell < W0)
            n = y * w + first
            line_end = tl.minimum((y + 1) * w, in_grid)
            end = tl.minimum(n + tokens, line_end)
            for t0 in range(0, tl.where(y * w < line_end, _widest(seen, seen_row), 0), 2):
                for t in tl.static_range(2):
                    sees = n + (t0 + t) < end
                    weight = tl.load(weights_at + (t0 + t), mask=sees, other=0.0)
                    g_at = sample_at + ((n + (t0 + t)) * C)[:, None]
                    value = tl.load(g_at, mask=sees[:, None] & in_c[None, :], other=0.0)
                    grad += weight[:, None] * value.to(tl.float32)
            if PADDING:  # tokens behind the grid take cell (0, 0), as token 0 does
                weight = tl.load(weights_at, mask=(first == 0) & (tokens > 0), other=0.0)
                for start in range(in_grid, tl.where(y == 0, N, 0), CELLS):
                    past = start + tl.arange(0, CELLS)
                    g_at = sample_at + (past * C)[:, None]
                    rest = tl.load(g_at, mask=(past < N)[:, None] & in_c[None, :], other=0.0).to(tl.float32)
                    grad += weight[:, None] * tl.sum(rest, 0)[None, :]
        out_at = strips + ((number * W0 + cell) * C)[:, None] + c[None, :]
        tl.store(out_at, grad, mask=(cell < W0)[:, None] & in_c[None, :])


@triton.jit(do_not_specialize=["B", "N"])
def table_grad_kernel(
    g, strips, out, cells, plan, heights, seen_y, bands_y, bands_x, weights, B, N, C, W0: tl.constexpr
):
    """The table's gradient (H0, W0, C): a row sums the few strips of each height that see it, then single tokens.

    Programs: (H0, blocks of COLUMNS, blocks of CHANNELS). Token by token go the samples behind those in order in the
    plan, which comes sorted. That costs many times the rest; no loader makes such samples.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    in_c = c < C
    live = (column < W0)[:, None] & in_c[None, :]
    at = (column * C)[:, None] + c[None, :]
    grad = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    strip0, begin = 0, 0
    for index in range(STRIPS):
        rows = tl.load(heights + index)
        begin += tl.load(heights + STRIPS + index)
        band = index * tl.num_programs(0) + row
        weights_at, first, count = _band(seen_y, weights, band, rows > 0)
        source = strips + (strip0 + first) * W0 * C + at
        grad = _add_lines(grad, source, W0 * C, live, weights_at, tl.minimum(count, rows - first))
        strip0 += rows
    for k in range(begin, B):
        tokens = tl.load(plan + k * PLAN + 1)
        to_h = tl.load(plan + k * PLAN + 4)
        to_w = tl.load(plan + k * PLAN + 5)
        sample = tl.load(plan + k * PLAN + 6).to(tl.int64)
        for start in range(0, tokens, TOKENS):
            n = start + tl.arange(0, TOKENS)
            cell = tl.load(cells + sample * N + n, mask=n < tokens, other=-1)
            band = to_h * (to_h - 1) // 2 + (cell >> 16)
            weights_at, first, count = _band(bands_y, weights, band, cell >= 0)
            sees = (row >= first) & (row < first + count)
            weight = tl.load(weights_at + row - first, mask=sees, other=0.0)
            if tl.max(tl.abs(weight), 0) > 0.0:
                band = to_w * (to_w - 1) // 2 + (cell & 0xFFFF)
                along_at, first_x, count_x = _band(bands_x, weights, band, sees)
                tap = column[:, None] - first_x[None, :]
                along = tl.load(along_at[None, :] + tap, mask=(tap >= 0) & (tap < count_x[None, :]), other=0.0)
                g_at = g + sample * N * C + (n * C)[:, None] + c[None, :]
                value = tl.load(g_at, mask=sees[:, None] & in_c[None, :], other=0.0).to(tl.float32)
                grad = tl.dot(along, weight[:, None] * value, grad, input_precision="ieee")
    tl.store(out + row * W0 * C + at, grad, mask=live)
