"""The gradient of the matmul strategy's table, as Triton kernels; names and plan as in ``triton_kernels``."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import PLAN, _centre, _entry, _read_scale, _stretch


@triton.jit(do_not_specialize=["B", "N", "splits"])
def table_grad_kernel(
    g_ptr,
    out_ptr,
    plan_ptr,
    norm_ptr,
    order_ptr,
    B,
    N,
    C,
    splits,
    g_b,
    g_n,
    g_c,
    H0: tl.constexpr,
    W0: tl.constexpr,
    BICUBIC: tl.constexpr,
    ANTIALIAS: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    W0_BLOCK: tl.constexpr,
):
    """A row of the table's gradient from one split of the samples. Programs: (splits * H0, blocks of CHANNELS).

    ``order`` names the samples by rising ``to_w``: as long as that stays the same, A_h^T g is summed over samples, and
    then contracted with A_w^T once for all of them. Everything is added in one order. Samples that are not in
    row-major order, the last ones, are left to ``token_grad_kernel``.
    """
    row = tl.program_id(0) % H0
    split = splits - 1 - tl.program_id(0) // H0  # the widest grids, which are most work, first
    begin = split * B // splits
    end = (split + 1) * B // splits
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_c = c < C
    grad = tl.zeros([W0_BLOCK, CHANNELS], tl.float32)
    start = begin * 0
    widest = start + 1
    while start < widest:  # TOKENS columns at a time
        t = start + tl.arange(0, TOKENS)
        sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
        current = start * 0
        current_scale = 0.0 * current
        # A sample's facts are asked for while the one before it is summed.
        sample = tl.load(order_ptr + begin)
        tokens = tl.load(plan_ptr + sample * PLAN)
        w = tl.load(plan_ptr + sample * PLAN + 1)
        misplaced = tl.load(plan_ptr + sample * PLAN + 2)
        to_w = tl.load(plan_ptr + sample * PLAN + 3)
        scale_y = _read_scale(plan_ptr + sample * PLAN + 4)
        scale_x = _read_scale(plan_ptr + sample * PLAN + 5)
        for k in range(begin, end + 1):
            next_sample = tl.load(order_ptr + tl.minimum(k + 1, end - 1))
            next_at = plan_ptr + next_sample * PLAN
            next_tokens = tl.load(next_at)
            next_w = tl.load(next_at + 1)
            next_misplaced = tl.load(next_at + 2)
            next_to_w = tl.load(next_at + 3)
            next_scale_y = _read_scale(next_at + 4)
            next_scale_x = _read_scale(next_at + 5)
            width = tl.where((misplaced == 0) & (k < end), tl.minimum(w, tokens), 0)
            widest = tl.maximum(widest, width)
            if (current > 0) & (((width > start) & (to_w != current)) | (k == end)):
                live = t < current
                grad = _contract_columns(
                    grad, sums, t, live, current_scale, W0, BICUBIC, ANTIALIAS, ALIGN_CORNERS, W0_BLOCK
                )
                sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
            if width > start:
                current = to_w
                current_scale = scale_x
                sums = _sum_rows(
                    sums, g_ptr + sample * g_b, norm_ptr + sample * N, row, t, w, scale_y, tokens, c, in_c, g_n, g_c,
                    H0, BICUBIC, ANTIALIAS, ALIGN_CORNERS,
                )  # fmt: skip
            sample = next_sample
            tokens = next_tokens
            w = next_w
            misplaced = next_misplaced
            to_w = next_to_w
            scale_y = next_scale_y
            scale_x = next_scale_x
        start += TOKENS
    col = tl.arange(0, W0_BLOCK)
    out_at = out_ptr + ((split * H0 + row).to(tl.int64) * W0 + col)[:, None] * C + c[None, :]
    tl.store(out_at, grad, mask=(col < W0)[:, None] & in_c[None, :])


@triton.jit(do_not_specialize=["B", "splits", "coord_b", "coord_n", "coord_c"])
def token_grad_kernel(
    g_ptr,
    out_ptr,
    coord_ptr,
    plan_ptr,
    order_ptr,
    B,
    C,
    splits,
    g_b,
    g_n,
    g_c,
    coord_b,
    coord_n,
    coord_c,
    H0: tl.constexpr,
    W0: tl.constexpr,
    BICUBIC: tl.constexpr,
    ANTIALIAS: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    H0_BLOCK: tl.constexpr,
    W0_BLOCK: tl.constexpr,
):
    """Adds what samples that are not in row-major order give; programs as those of ``table_grad_kernel``, run after it.

    Each token is contracted by itself, which costs many times the other kernel: no loader makes such samples.
    """
    row = tl.program_id(0) % H0
    split = tl.program_id(0) // H0
    begin = split * B // splits
    end = (split + 1) * B // splits
    if tl.load(plan_ptr + tl.load(order_ptr + end - 1) * PLAN + 2) != 0:  # they are sorted to the end
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        in_c = c < C
        grad = tl.zeros([W0_BLOCK, CHANNELS], tl.float32)
        for k in range(begin, end):
            sample = tl.load(order_ptr + k)
            at = plan_ptr + sample * PLAN
            if tl.load(at + 2) != 0:
                tokens = tl.load(at)
                scale_y = _read_scale(at + 4)
                scale_x = _read_scale(at + 5)
                shrink = 1.0 / _stretch(scale_y, ANTIALIAS)
                for start in range(0, tokens, TOKENS):
                    n = start + tl.arange(0, TOKENS)
                    coord_at = coord_ptr + sample * coord_b + n.to(tl.int64) * coord_n
                    y = tl.load(coord_at, mask=n < tokens, other=-1).to(tl.int32)
                    x = tl.load(coord_at + coord_c, mask=n < tokens, other=-1).to(tl.int32)
                    live = (y >= 0) & (x >= 0)
                    centre = _centre(y, scale_y, H0, BICUBIC, ANTIALIAS, ALIGN_CORNERS)
                    weight = _entry(row, centre, shrink, H0, BICUBIC, ANTIALIAS)
                    if ANTIALIAS:
                        cell = tl.arange(0, H0_BLOCK)[None, :]
                        every = _entry(cell, centre[:, None], shrink, H0, BICUBIC, ANTIALIAS)
                        total = tl.sum(tl.where(cell < H0, every, 0.0), 1)
                        weight = weight / tl.where(live, total, 1.0)
                    weight = tl.where(live, weight, 0.0)
                    if tl.max(tl.abs(weight), 0) > 0.0:
                        g_at = g_ptr + sample * g_b + n.to(tl.int64)[:, None] * g_n + (c * g_c)[None, :]
                        g = tl.load(g_at, mask=live[:, None] & in_c[None, :], other=0.0)
                        sums = weight[:, None] * g.to(tl.float32)
                        grad = _contract_columns(
                            grad, sums, x, live, scale_x, W0, BICUBIC, ANTIALIAS, ALIGN_CORNERS, W0_BLOCK
                        )
        col = tl.arange(0, W0_BLOCK)
        out_at = out_ptr + ((split * H0 + row).to(tl.int64) * W0 + col)[:, None] * C + c[None, :]
        mask = (col < W0)[:, None] & in_c[None, :]
        tl.store(out_at, tl.load(out_at, mask=mask, other=0.0) + grad, mask=mask)


@triton.jit
def _sum_rows(
    sums, g_ptr, norm_ptr, row, t, w, scale, tokens, c, in_c, g_n, g_c,
    H0: tl.constexpr, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
):  # fmt: skip
    """``sums`` plus the rows of a sample's gradient that see the table's ``row``, each times its weight."""
    RADIUS: tl.constexpr = 2.0 if BICUBIC else 1.0
    AT_ONCE: tl.constexpr = 4 if BICUBIC else 2
    stretch = _stretch(scale, ANTIALIAS)
    shrink = 1.0 / stretch
    rows = tl.cdiv(tokens, w)
    # The positions y whose centre lies within reach of the row; a little more, lest rounding take one away.
    per_cell = 1.0 / tl.maximum(scale, 1e-6)
    middle = row * per_cell
    if ANTIALIAS or not ALIGN_CORNERS:
        middle = (row + 0.5) * per_cell - 0.5
    reach = RADIUS * stretch * per_cell * 1.0001 + 0.001
    first = tl.ceil(tl.maximum(middle - reach, 0.0)).to(tl.int32)
    end = tl.floor(tl.minimum(middle + reach, rows - 1.0)).to(tl.int32) + 1
    if not ANTIALIAS:  # the border's rows are seen from beyond it too
        first = tl.where(row == 0, 0, first)
        end = tl.where(row == H0 - 1, rows, end)
    if ALIGN_CORNERS:  # one position, at 0, has scale 0
        first = tl.where(scale > 0.0, first, 0)
        end = tl.where(scale > 0.0, end, rows)
    for y0 in range(first, end, AT_ONCE):
        for k in tl.static_range(AT_ONCE):  # so many loads are on their way at once
            y = y0 + k
            centre = _centre(y, scale, H0, BICUBIC, ANTIALIAS, ALIGN_CORNERS)
            weight = _entry(row, centre, shrink, H0, BICUBIC, ANTIALIAS)
            if ANTIALIAS:
                weight = weight * tl.load(norm_ptr + tl.minimum(y, rows - 1))
            weight = tl.where(y < end, weight, 0.0)
            n = y * w + t
            seen = (t < tl.where(weight != 0.0, w, 0)) & (n < tokens)
            at = g_ptr + n.to(tl.int64)[:, None] * g_n + (c * g_c)[None, :]
            g = tl.load(at, mask=seen[:, None] & in_c[None, :], other=0.0)
            sums = sums + weight * g.to(tl.float32)
    return sums


@triton.jit
def _contract_columns(
    grad, sums, columns, live, scale,
    W0: tl.constexpr, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    W0_BLOCK: tl.constexpr,
):  # fmt: skip
    """``grad`` (W0_BLOCK, CHANNELS) plus A_w^T of the sums (TOKENS, CHANNELS) that stand at ``columns``."""
    centre = _centre(columns, scale, W0, BICUBIC, ANTIALIAS, ALIGN_CORNERS)
    cell = tl.arange(0, W0_BLOCK)[:, None]
    weights = _entry(cell, centre[None, :], 1.0 / _stretch(scale, ANTIALIAS), W0, BICUBIC, ANTIALIAS)
    weights = tl.where((cell < W0) & live[None, :], weights, 0.0)
    if ANTIALIAS:
        weights = weights / tl.where(live, tl.sum(weights, 0), 1.0)[None, :]
    return tl.dot(weights, sums, grad, input_precision="ieee")
