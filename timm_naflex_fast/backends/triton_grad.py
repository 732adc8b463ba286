"""The Triton kernels of the table's gradient; names, plan and bands as in ``triton_kernels``.

Nothing is added by atomics: a program owns what it writes and adds in one order, so that results never vary by a bit.
The plan comes sorted: samples in row-major order by their resized height, then those that go token by token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import PLAN, _strip, _whole


@triton.jit(do_not_specialize=["N"])
def strips_grad_kernel(
    g_ptr,
    strips_ptr,
    plan_ptr,
    heights_ptr,
    seen_ptr,
    seen_weights_ptr,
    bands_ptr,
    weights_ptr,
    N,
    C,
    g_b,
    g_n,
    g_c,
    W0: tl.constexpr,
    PADDING: tl.constexpr,
    STRIPS: tl.constexpr,
    TAPS: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The gradient of every strip: a cell sums the few tokens that see it, over all samples of the strip's height.

    Programs: (any number, blocks of CHANNELS). ``seen`` holds the bands of ``A_w^T``: row ``cell`` of length ``n`` is
    row ``(n - 1) * W0 + cell``. ``bands`` (of ``A_w``) is read with PADDING only, for all padding tokens see cell 0.
    """
    BLOCKS: tl.constexpr = (W0 + CELLS - 1) // CELLS
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_c = c < C
    height = tl.arange(0, STRIPS)
    samples = tl.load(heights_ptr + STRIPS + height)
    _, _, count = _strip(0, heights_ptr, STRIPS)
    for work in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        number = work // BLOCKS
        cell = work % BLOCKS * CELLS + tl.arange(0, CELLS)
        index, y, _ = _strip(number, heights_ptr, STRIPS)
        begin = tl.sum(tl.where(height < index, samples, 0), 0)
        end = begin + tl.sum(tl.where(height == index, samples, 0), 0)
        grad = tl.zeros([CELLS, CHANNELS], tl.float32)
        for k in range(begin, end):
            at = plan_ptr + k * PLAN
            tokens = tl.load(at)
            cells = tl.load(at + 1)
            w = tl.load(at + 2)
            to_w = tl.load(at + 4)
            taps = tl.load(at + 7)
            sample_at = g_ptr + tl.load(at + 8).to(tl.int64) * g_b + (c * g_c)[None, :]
            line_end = tl.minimum(tl.minimum((y + 1) * w, cells), tokens)
            band = tl.load(seen_ptr + (to_w - 1) * W0 + cell, mask=cell < W0, other=0)
            weights_at = seen_weights_ptr + (band >> 32)
            n = y * w + ((band >> 16) & 0xFFFF).to(tl.int32)
            seen_end = tl.minimum(n + (band & 0xFFFF).to(tl.int32), line_end)
            for t0 in range(0, tl.where(y * w < line_end, taps, 0), TAPS):
                for t in tl.static_range(TAPS):
                    sees = n + (t0 + t) < seen_end
                    weight = tl.load(weights_at + (t0 + t), mask=sees, other=0.0)
                    g_at = sample_at + (n + (t0 + t)).to(tl.int64)[:, None] * g_n
                    g = tl.load(g_at, mask=sees[:, None] & in_c[None, :], other=0.0)
                    grad += weight[:, None] * g.to(tl.float32)
            if PADDING:
                if y == 0:
                    total = tl.zeros([CELLS, CHANNELS], tl.float32)
                    for start in range(cells, N, CELLS):
                        past = start + tl.arange(0, CELLS)
                        g_at = sample_at + past.to(tl.int64)[:, None] * g_n
                        total += tl.load(g_at, mask=(past < N)[:, None] & in_c[None, :], other=0.0).to(tl.float32)
                    band0 = tl.load(bands_ptr + to_w * (to_w - 1) // 2)
                    tap = cell - ((band0 >> 16) & 0xFFFF).to(tl.int32)
                    sees = (tap >= 0) & (tap < (band0 & 0xFFFF).to(tl.int32))
                    weight0 = tl.load(weights_ptr + (band0 >> 32) + tap, mask=sees, other=0.0)
                    grad += weight0[:, None] * tl.sum(total, 0)[None, :]
        out_at = strips_ptr + ((number * W0 + cell) * C)[:, None] + c[None, :]
        tl.store(out_at, grad, mask=(cell < W0)[:, None] & in_c[None, :])


@triton.jit
def table_grad_kernel(
    strips_ptr,
    out_ptr,
    heights_ptr,
    seen_ptr,
    seen_weights_ptr,
    H0: tl.constexpr,
    width,
    STRIPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The table's gradient (H0, W0 * C): a row sums the few strips of each height that see it.

    Programs: (H0, blocks of a row). ``seen`` holds the bands of ``A_h^T`` as in ``strips_grad_kernel``.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros([BLOCK], tl.float32)
    strip0 = 0
    for index in range(STRIPS):
        rows = tl.load(heights_ptr + index)
        if rows > 0:
            band = tl.load(seen_ptr + index * H0 + tl.program_id(0))
            weights_at = seen_weights_ptr + (band >> 32)
            first = ((band >> 16) & 0xFFFF).to(tl.int32)
            taps = tl.minimum((band & 0xFFFF).to(tl.int32), rows - first)
            strip_at = strips_ptr + (strip0 + first) * width + at
            for start in range(0, taps, TAPS):
                for k in tl.static_range(TAPS):
                    has = at < tl.where(taps > start + k, width, 0)
                    weight = tl.load(weights_at + tl.minimum(start + k, taps - 1))
                    grad += weight * tl.load(strip_at + (start + k) * width, mask=has, other=0.0)
        strip0 += rows
    tl.store(out_ptr + tl.program_id(0) * width + at, grad, mask=at < width)


@triton.jit(do_not_specialize=["B", "coord_b", "coord_n", "coord_c"])
def token_grad_kernel(
    g_ptr,
    out_ptr,
    coord_ptr,
    plan_ptr,
    heights_ptr,
    bands_y_ptr,
    weights_y_ptr,
    bands_x_ptr,
    weights_x_ptr,
    B,
    C,
    g_b,
    g_n,
    g_c,
    coord_b,
    coord_n,
    coord_c,
    W0: tl.constexpr,
    STRIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Adds to the table's gradient what samples in another order, or too high for strips, give: token by token.

    Programs: (H0 * blocks of CELLS, blocks of CHANNELS), each a part of one row of the table. This costs many times
    the other kernels; no loader makes such samples, and without any each program ends at once.
    """
    BLOCKS: tl.constexpr = (W0 + CELLS - 1) // CELLS
    begin = tl.sum(tl.load(heights_ptr + STRIPS + tl.arange(0, STRIPS)), 0)
    if begin < B:
        row = tl.program_id(0) // BLOCKS
        cell = tl.program_id(0) % BLOCKS * CELLS + tl.arange(0, CELLS)
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        out_at = out_ptr + ((row * W0 + cell) * C)[:, None] + c[None, :]
        mask = (cell < W0)[:, None] & (c < C)[None, :]
        grad = tl.load(out_at, mask=mask, other=0.0)
        for k in range(begin, B):
            at = plan_ptr + k * PLAN
            to_h = tl.load(at + 3)
            to_w = tl.load(at + 4)
            sample = tl.load(at + 8).to(tl.int64)
            for start in range(0, tl.where(to_h > 0, tl.load(at), 0), TOKENS):
                n = start + tl.arange(0, TOKENS)
                live = n < tl.load(at)
                coord_at = coord_ptr + sample * coord_b + n.to(tl.int64) * coord_n
                y = _whole(coord_at, live)
                x = _whole(coord_at + coord_c, live)
                live = live & (y >= 0) & (x >= 0)
                band = tl.load(bands_y_ptr + to_h * (to_h - 1) // 2 + y, mask=live, other=0)
                tap = row - ((band >> 16) & 0xFFFF).to(tl.int32)
                sees = (tap >= 0) & (tap < (band & 0xFFFF).to(tl.int32))
                weight = tl.load(weights_y_ptr + (band >> 32) + tap, mask=sees, other=0.0)
                if tl.max(tl.abs(weight), 0) > 0.0:
                    band = tl.load(bands_x_ptr + to_w * (to_w - 1) // 2 + x, mask=sees, other=0)
                    tap_x = cell[:, None] - ((band >> 16) & 0xFFFF).to(tl.int32)[None, :]
                    sees_x = (tap_x >= 0) & (tap_x < (band & 0xFFFF).to(tl.int32)[None, :])
                    along = tl.load(weights_x_ptr + (band >> 32)[None, :] + tap_x, mask=sees_x, other=0.0)
                    g_at = g_ptr + sample * g_b + n.to(tl.int64)[:, None] * g_n + (c * g_c)[None, :]
                    g = tl.load(g_at, mask=sees[:, None] & (c < C)[None, :], other=0.0)
                    grad = tl.dot(along, weight[:, None] * g.to(tl.float32), grad, input_precision="ieee")
        tl.store(out_at, grad, mask=mask)
