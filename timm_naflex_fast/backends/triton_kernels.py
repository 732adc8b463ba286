"""The Triton kernels of the matmul strategy, forward and gradient; ``triton.py`` launches them. The host reads nothing.

A *strip row* is a line of a resized table before its columns are resized: row ``y`` of ``A_h . P``, (W0, C). They exist
for resized heights of at most ``STRIPS``, and only for the (height, row) that occur in the batch, one after another:
first those of height 1, then of height 2, ... ``heights`` (2, STRIPS) int32 holds how many rows of each height occur,
and how many samples in row-major order have that height.

*Bands* (int32) hold the matrices ``A_1, A_2, ...`` of one axis. Every row of ``A_n`` has the same count of taps, in
neighbouring columns; some of their weights are 0. ``bands[2 (n - 1)]`` says where the weights of ``A_n`` begin,
``bands[2 (n - 1) + 1]`` counts the taps, and from ``ROWS`` on lies the first column of each row: of row ``y`` of
``A_n`` at ``n (n - 1) / 2 + y``, of row ``cell`` of its transpose (``seen``) at ``(n - 1) N0 + cell``.

``packed_yx`` (B, N) int32 holds the coordinates of each token as ``y << 16 | x``, -1 where they name no cell.
``samples`` (B, FACTS) int32 has one row for each sample; KEY, TOKENS, ... below are its columns: the key (the resized
height; STRIPS + 1 where the gradient is summed token by token, because the tokens are in another order or the height is
above STRIPS), how many tokens get an embedding, how many lie in the grid, the grid's width, the height and the width to
which the table is resized, and the sample's number.

Gradients take no atomics: a program owns what it writes and adds in one order, so that results never vary by a bit.
What changes from batch to batch is not specialized on: Triton would compile in the middle of a training.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import bands

STRIPS = tl.constexpr(64)  # the largest resized height that has strip rows
ROWS = tl.constexpr(bands.ROWS)
KEY, TOKENS, IN_GRID, WIDTH, TO_H, TO_W, NUMBER, FACTS = (tl.constexpr(i) for i in range(8))
HUGE = tl.constexpr(2**14)  # longer than any length that has a matrix
# How many numbers, tokens, channels and columns of the table one program handles at a time.
BLOCK_SIZE = tl.constexpr(1024)
BLOCK_TOKENS = tl.constexpr(32)
BLOCK_CHANNELS = tl.constexpr(64)
BLOCK_COLUMNS = tl.constexpr(16)  # the least side of a product; 32 would take three times the registers
PARTS = tl.constexpr(16)


@triton.jit
def _whole(at, live):
    """Coordinates as int32: -1 where negative or not live, HUGE where larger than that."""
    return tl.minimum(tl.maximum(tl.load(at, mask=live, other=-1), -1), HUGE).to(tl.int32)


@triton.jit
def _matrix(bands_ptr, length):
    """Where the weights of the matrix of a length begin, and the count of taps of its rows."""
    return tl.load(bands_ptr + 2 * (length - 1)), tl.load(bands_ptr + 2 * (length - 1) + 1)


@triton.jit
def _channels(c0, C: tl.constexpr):
    """A block of channels, and which of them exist, (1, BLOCK_CHANNELS)."""
    c = c0 + tl.arange(0, BLOCK_CHANNELS)
    if C // BLOCK_CHANNELS * BLOCK_CHANNELS == C:  # no comparison in the kernel
        return c[None, :], tl.full([1, BLOCK_CHANNELS], True, tl.int1)
    else:
        return c[None, :], (c < C)[None, :]


@triton.jit
def _height(number, heights_ptr):
    """Of a strip row: its height - 1 and its row there."""
    ends = tl.cumsum(tl.load(heights_ptr + tl.arange(0, STRIPS)), 0)
    return tl.sum((ends <= number).to(tl.int32), 0), number - tl.max(tl.where(ends <= number, ends, 0), 0)


@triton.jit
def _parts(count, room):
    """In how many parts the gradient of each strip row is summed: few rows alone would leave the GPU idle."""
    return tl.maximum(tl.minimum(room // tl.maximum(count, 1), PARTS), 1)


@triton.jit(do_not_specialize=["n_tokens", "H0", "W0", "longest"])
def plan_kernel(
    coord_ptr, packed_yx_ptr, samples_ptr, heights_ptr, lost_ptr, n_tokens, H0, W0, longest,
    AR_PRESERVING: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One program per sample: its cells, its facts, its marks in ``heights`` (zeros before), its lost tokens."""
    sample = tl.program_id(0).to(tl.int64)
    coord_ptr += sample * n_tokens * 2
    highest_y = tl.full([BLOCK_SIZE], -1, tl.int32)
    highest_x = tl.full([BLOCK_SIZE], -1, tl.int32)
    for start in range(0, n_tokens, BLOCK_SIZE):
        n = start + tl.arange(0, BLOCK_SIZE)
        highest_y = tl.maximum(highest_y, _whole(coord_ptr + n * 2, n < n_tokens))
        highest_x = tl.maximum(highest_x, _whole(coord_ptr + n * 2 + 1, n < n_tokens))
    h = tl.max(highest_y, 0) + 1
    w = tl.max(highest_x, 0) + 1
    as_is = ((h == H0) & (w == W0)) | (not AR_PRESERVING)
    to_h = tl.where(as_is, h, tl.maximum(h, w))
    to_w = tl.where(as_is, w, tl.maximum(h, w))
    known = (h > 0) & (w > 0) & (to_h <= longest) & (to_w <= longest)
    in_grid = tl.minimum(h * w, n_tokens)
    tokens = n_tokens if PADDING else tl.where(known, in_grid, n_tokens)
    wrong = tl.zeros([BLOCK_SIZE], tl.int32)
    lost = tl.zeros([BLOCK_SIZE], tl.int32)
    for start in range(0, tokens, BLOCK_SIZE):
        n = start + tl.arange(0, BLOCK_SIZE)
        y = _whole(coord_ptr + n * 2, n < tokens)
        x = _whole(coord_ptr + n * 2 + 1, n < tokens)
        named = known & (y >= 0) & (x >= 0)
        want = tl.where(n < in_grid, n, 0)  # with PADDING tokens outside the grid take cell 0
        wrong += ((n < tokens) & ((y * w + x != want) | (x < 0))).to(tl.int32)
        lost += ((n < tokens) & (named == 0)).to(tl.int32)
        tl.store(packed_yx_ptr + sample * n_tokens + n, tl.where(named, y << 16 | x, -1), mask=n < tokens)
    has_strips = known & (to_h <= STRIPS)
    in_order = has_strips & (tl.sum(wrong, 0) == 0)
    tl.atomic_max(heights_ptr + to_h - 1, h, mask=has_strips, sem="relaxed")
    tl.atomic_add(heights_ptr + STRIPS + to_h - 1, 1, mask=in_order, sem="relaxed")
    tl.atomic_add(lost_ptr, tl.sum(lost, 0), mask=tl.sum(lost, 0) > 0, sem="relaxed")
    samples_ptr += sample * FACTS
    tl.store(samples_ptr + KEY, tl.where(in_order, to_h, STRIPS + 1))
    tl.store(samples_ptr + TOKENS, tokens)
    tl.store(samples_ptr + IN_GRID, in_grid)
    tl.store(samples_ptr + WIDTH, w)
    tl.store(samples_ptr + TO_H, tl.where(known, to_h, 1))
    tl.store(samples_ptr + TO_W, tl.where(known, to_w, 1))
    tl.store(samples_ptr + NUMBER, sample.to(tl.int32))


@triton.jit
def strips_kernel(table_ptr, strips_ptr, heights_ptr, bands_ptr, weights_ptr, W0: tl.constexpr, C: tl.constexpr):
    """Every strip row that occurs, from the rows of the table.

    Programs: (any number, blocks of W0 * C). All that run at one time share a block of the table's columns.
    """
    at = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    live = at < W0 * C
    count = tl.sum(tl.load(heights_ptr + tl.arange(0, STRIPS)), 0)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        index, y = _height(number, heights_ptr)
        start, taps = _matrix(bands_ptr, index + 1)
        first = tl.load(bands_ptr + ROWS + index * (index + 1) // 2 + y)
        row = tl.zeros([BLOCK_SIZE], tl.float32)
        for k in tl.range(0, taps, loop_unroll_factor=4):  # so many loads are on their way at once
            weight = tl.load(weights_ptr + start + y * taps + k)
            row += weight * tl.load(table_ptr + (first + k) * (W0 * C) + at, mask=live, other=0.0)
        tl.store(strips_ptr + number * (W0 * C) + at, row, mask=live)


@triton.jit(do_not_specialize=["n_tokens"])
def add_kernel(
    x_ptr, out_ptr, source_ptr, packed_yx_ptr, samples_ptr, heights_ptr, bands_y_ptr, bands_x_ptr, weights_ptr,
    n_tokens, W0: tl.constexpr, C: tl.constexpr, HIGHEST: tl.constexpr, DIRECT: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """``out = x + embedding``; tokens without an embedding are written only with COPY. ``out`` may be ``x``.

    Programs: (B * blocks of BLOCK_TOKENS, any number for the blocks of channels). A token sums the few cells of its
    strip row that it sees (``source``: the strip rows) or, DIRECT, cells of the table itself (``source``): that serves
    the samples with a resized height above HIGHEST, and the other launch the rest.
    """
    STEP: tl.constexpr = 2 - W0 % 2  # of an even table, rows have an even count of taps
    blocks = tl.cdiv(n_tokens, BLOCK_TOKENS)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    samples_ptr += sample * FACTS
    to_h = tl.load(samples_ptr + TO_H)
    tokens = tl.load(samples_ptr + TOKENS)
    end = n_tokens if COPY else tokens
    n0 = tl.program_id(0) % blocks * BLOCK_TOKENS
    if (to_h > HIGHEST) != DIRECT or n0 >= end:
        return
    x_ptr += sample * n_tokens * C
    out_ptr += sample * n_tokens * C
    to_w = tl.load(samples_ptr + TO_W)
    n = n0 + tl.arange(0, BLOCK_TOKENS)
    packed = tl.load(packed_yx_ptr + sample * n_tokens + n, mask=n < tokens, other=-1)
    yx = tl.maximum(packed, 0)
    start_x, taps_x = _matrix(bands_x_ptr, to_w)
    first = tl.load(bands_x_ptr + ROWS + to_w * (to_w - 1) // 2 + (yx & 0xFFFF))
    weights_x_ptr = weights_ptr + start_x + (yx & 0xFFFF) * taps_x
    if DIRECT:
        start_y, taps_y = _matrix(bands_y_ptr, to_h)
        first += tl.load(bands_y_ptr + ROWS + to_h * (to_h - 1) // 2 + (yx >> 16)) * W0
        weights_y_ptr = weights_ptr + start_y + (yx >> 16) * taps_y
    else:
        height = tl.arange(0, STRIPS)
        before = tl.sum(tl.where(height + 1 < to_h, tl.load(heights_ptr + height), 0), 0)
        first += (before + (yx >> 16)) * W0
    # What is known of the tokens by now serves several blocks of channels.
    for c0 in range(tl.program_id(1) * BLOCK_CHANNELS, C, tl.num_programs(1) * BLOCK_CHANNELS):
        c, in_c = _channels(c0, C)
        live = (n < end)[:, None] & in_c
        # Asked for first: it comes from afar, the cells from near by.
        value = tl.load(x_ptr + (n * C)[:, None] + c, mask=live, other=0.0)
        embedding = tl.where(packed >= 0, 0.0, float("nan"))[:, None] + tl.zeros(
            [BLOCK_TOKENS, BLOCK_CHANNELS], tl.float32
        )
        at = source_ptr + (first * C)[:, None] + c
        if DIRECT:
            for j in range(taps_y):
                weight_y = tl.load(weights_y_ptr + j)
                for k0 in range(0, taps_x, STEP):
                    for k in tl.static_range(STEP):
                        weight = weight_y * tl.load(weights_x_ptr + k0 + k)
                        line = tl.load(at + (j * W0 + k0) * C + k * C, mask=in_c, other=0.0)
                        embedding += weight[:, None] * line
        else:
            for k0 in range(0, taps_x, STEP):
                for k in tl.static_range(STEP):  # so many loads are on their way at once
                    weight = tl.load(weights_x_ptr + k0 + k)
                    embedding += weight[:, None] * tl.load(at + k0 * C + k * C, mask=in_c, other=0.0)
        # Rounded to the dtype of x before the addition, as timm does, and after it.
        total = (value.to(tl.float32) + embedding.to(value.dtype).to(tl.float32)).to(value.dtype)
        if COPY:
            total = tl.where((n < tokens)[:, None], total, value)
        tl.store(out_ptr + (n * C)[:, None] + c, total, mask=live)


@triton.jit(do_not_specialize=["n_tokens", "room"])
def strips_grad_kernel(
    g_ptr, strips_ptr, samples_ptr, heights_ptr, seen_ptr, weights_ptr, n_tokens, room,
    W0: tl.constexpr, C: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """The gradient of every strip row, in parts: a cell sums the few tokens that see it, over samples of that height.

    Programs: (any number, blocks of channels). ``samples`` come sorted by their key.
    """
    BLOCK_CELLS: tl.constexpr = 16 if W0 <= 16 else 32
    blocks: tl.constexpr = (W0 + BLOCK_CELLS - 1) // BLOCK_CELLS
    c, in_c = _channels(tl.program_id(1) * BLOCK_CHANNELS, C)
    height = tl.arange(0, STRIPS)
    many = tl.load(heights_ptr + STRIPS + height)
    count = tl.sum(tl.load(heights_ptr + height), 0)
    parts = _parts(count, room)
    for work in range(tl.program_id(0), count * parts * blocks, tl.num_programs(0)):
        part = work // blocks
        cell = work % blocks * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
        index, y = _height(part // parts, heights_ptr)
        begin = tl.sum(tl.where(height < index, many, 0), 0)
        grad = tl.zeros([BLOCK_CELLS, BLOCK_CHANNELS], tl.float32)
        for i in range(begin + part % parts, begin + tl.sum(tl.where(height == index, many, 0), 0), parts):
            facts_ptr = samples_ptr + i * FACTS
            in_grid = tl.load(facts_ptr + IN_GRID)
            to_w = tl.load(facts_ptr + TO_W)
            line = y * tl.load(facts_ptr + WIDTH)
            sample = tl.load(facts_ptr + NUMBER).to(tl.int64)
            start, taps = _matrix(seen_ptr, to_w)
            first = tl.load(seen_ptr + ROWS + (to_w - 1) * W0 + cell, mask=cell < W0, other=0)
            weights_at = weights_ptr + start + cell * taps
            line_end = tl.minimum(line + tl.load(facts_ptr + WIDTH), in_grid)
            left = tl.minimum(tl.where(cell < W0, line_end - line - first, 0), taps)  # the tokens that the cell sees
            at = g_ptr + (sample * n_tokens + line) * C + (first * C)[:, None] + c
            for k0 in range(0, tl.where(line < line_end, taps, 0), 2):
                for k in tl.static_range(2):
                    sees = left > k0 + k
                    weight = tl.load(weights_at + k0 + k, mask=sees, other=0.0)
                    value = tl.load(at + k0 * C + k * C, mask=sees[:, None] & in_c, other=0.0)
                    grad += weight[:, None] * value.to(tl.float32)
            if PADDING:  # tokens after the grid take cell (0, 0), as token 0 does
                weight = tl.load(weights_at, mask=(first == 0) & (cell < W0), other=0.0)
                for n0 in range(in_grid, tl.where(y == 0, n_tokens, 0), BLOCK_CELLS):
                    n = n0 + tl.arange(0, BLOCK_CELLS)
                    at = g_ptr + sample * n_tokens * C + (n * C)[:, None] + c
                    rest = tl.load(at, mask=(n < n_tokens)[:, None] & in_c, other=0.0).to(tl.float32)
                    grad += weight[:, None] * tl.sum(rest, 0)[None, :]
        out = strips_ptr + ((part * W0 + cell) * C)[:, None] + c
        tl.store(out, grad, mask=(cell < W0)[:, None] & in_c)


@triton.jit(do_not_specialize=["B", "n_tokens", "room"])
def table_grad_kernel(
    g_ptr, strips_ptr, out_ptr, packed_yx_ptr, samples_ptr, heights_ptr, seen_y_ptr, bands_y_ptr, bands_x_ptr,
    weights_ptr, B, n_tokens, room, W0: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The table's gradient (H0, W0, C): a row sums the few strip rows of each height that see it, then single tokens.

    Programs: (H0, blocks of columns, blocks of channels). Token by token go the samples behind those in order, which
    come sorted by their key. That costs many times the rest; no loader makes such samples.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    c, in_c = _channels(tl.program_id(2) * BLOCK_CHANNELS, C)
    live = (column < W0)[:, None] & in_c
    at = (column * C)[:, None] + c
    grad = tl.zeros([BLOCK_COLUMNS, BLOCK_CHANNELS], tl.float32)
    parts = _parts(tl.sum(tl.load(heights_ptr + tl.arange(0, STRIPS)), 0), room)
    before, begin = 0, 0
    for index in range(STRIPS):
        rows = tl.load(heights_ptr + index)
        begin += tl.load(heights_ptr + STRIPS + index)
        start, taps = _matrix(seen_y_ptr, index + 1)
        first = tl.load(seen_y_ptr + ROWS + index * tl.num_programs(0) + row)
        for part in range(tl.where(rows > 0, parts, 0)):
            source = strips_ptr + ((before + first) * parts + part) * (W0 * C) + at
            for k in tl.range(0, tl.minimum(taps, rows - first), loop_unroll_factor=4):
                weight = tl.load(weights_ptr + start + row * taps + k)
                grad += weight * tl.load(source + k * parts * (W0 * C), mask=live, other=0.0)
        before += rows
    for i in range(begin, B):
        facts_ptr = samples_ptr + i * FACTS
        tokens = tl.load(facts_ptr + TOKENS)
        to_h = tl.load(facts_ptr + TO_H)
        to_w = tl.load(facts_ptr + TO_W)
        sample = tl.load(facts_ptr + NUMBER).to(tl.int64)
        start_y, taps_y = _matrix(bands_y_ptr, to_h)
        start_x, taps_x = _matrix(bands_x_ptr, to_w)
        for n0 in range(0, tokens, BLOCK_TOKENS):
            n = n0 + tl.arange(0, BLOCK_TOKENS)
            packed = tl.load(packed_yx_ptr + sample * n_tokens + n, mask=n < tokens, other=-1)
            yx = tl.maximum(packed, 0)
            tap_y = row - tl.load(bands_y_ptr + ROWS + to_h * (to_h - 1) // 2 + (yx >> 16))
            sees = (packed >= 0) & (tap_y >= 0) & (tap_y < taps_y)
            weight = tl.load(weights_ptr + start_y + (yx >> 16) * taps_y + tap_y, mask=sees, other=0.0)
            if tl.max(tl.abs(weight), 0) > 0.0:
                first = tl.load(bands_x_ptr + ROWS + to_w * (to_w - 1) // 2 + (yx & 0xFFFF))
                tap_x = column[:, None] - first[None, :]
                along_at = weights_ptr + start_x + ((yx & 0xFFFF) * taps_x)[None, :] + tap_x
                along = tl.load(along_at, mask=(tap_x >= 0) & (tap_x < taps_x) & sees[None, :], other=0.0)
                g_at = g_ptr + sample * n_tokens * C + (n * C)[:, None] + c
                value = tl.load(g_at, mask=sees[:, None] & in_c, other=0.0).to(tl.float32)
                grad = tl.dot(along, weight[:, None] * value, grad, input_precision="ieee")
    tl.store(out_ptr + row * (W0 * C) + at, grad, mask=live)
