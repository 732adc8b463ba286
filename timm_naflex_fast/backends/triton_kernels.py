"""The matmul strategy's Triton kernels; ``matmul_triton`` launches them. Nothing here is read on the host.

Names: a table has ``H0 x W0`` cells, a sample's grid ``h x w``; ``to_h``, ``to_w`` are the lengths the table is resized
to before the crop. Row ``p`` of a resize matrix looks from ``centre`` (in table cells, 0 the middle of the first) as
far as ``reach``; a cell's weight is the filter at its distance over ``stretch``. As in weights.py, scale and centre are
rounded to float32 exactly where PyTorch rounds them; they are computed in float64 so that no compiler's fused
multiply-add can skip that rounding. Weights are float32, antialiased ones are normalised by their sum.

A row of the plan (int32) holds

    0  the count of tokens that get an embedding, min(N, h*w)
    1  w
    2  0 where all of these are in row-major order
    3  to_w, or the largest integer where they are not: samples are sorted by it for the gradient
    4  the bits of the float32 scale, table cells per position, of y
    5  and of x

Every kernel's axes of programs follow from shapes alone; what lies past a grid is a loop that ends at once. Sizes that
change from batch to batch are not specialized on: they would have kernels compiled again in the middle of a training.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAN = tl.constexpr(6)


@triton.jit
def _keys_or_triangle(distance, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr):
    """The filter: Keys (1981) with coefficient -0.5 where antialiased and -0.75 elsewhere, or the triangle."""
    if not BICUBIC:
        return tl.maximum(1.0 - distance, 0.0)
    a: tl.constexpr = -0.5 if ANTIALIAS else -0.75
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * a
    return tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))


@triton.jit
def _scale(length, n0, ALIGN_CORNERS: tl.constexpr):
    """Table cells per position, float32."""
    length = tl.maximum(length, 1).to(tl.float64)
    if ALIGN_CORNERS:
        return tl.where(length > 1.0, (n0 - 1) / tl.maximum(length - 1.0, 1.0), 0.0).to(tl.float32)
    return (n0 / length).to(tl.float32)


@triton.jit
def _read_scale(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _stretch(scale, ANTIALIAS: tl.constexpr):
    """How much wider than one cell the filter is."""
    if ANTIALIAS:
        return tl.maximum(scale, 1.0)
    return tl.full([], 1.0, tl.float32)


@triton.jit
def _centre(position, scale, n0, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    scale = scale.to(tl.float64)
    if ANTIALIAS:  # with align_corners PyTorch changes the scale here and nothing else
        return (scale * (position + 0.5)).to(tl.float32) - 0.5
    if ALIGN_CORNERS:
        centre = (scale * position).to(tl.float32)
    else:
        centre = (scale * (position + 0.5) - 0.5).to(tl.float32)
    if not BICUBIC:
        centre = tl.minimum(tl.maximum(centre, 0.0), n0 - 1.0)
    return centre


@triton.jit
def _entry(cell, centre, shrink, n0, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr):
    """An entry of the resize matrix, antialiased ones not yet normalised. ``cell`` lies in the table."""
    distance = tl.abs(cell - centre)
    weight = _keys_or_triangle(distance * shrink, BICUBIC, ANTIALIAS)
    if BICUBIC and not ANTIALIAS:  # taps beyond the table, two at most, are moved to its border
        low = _keys_or_triangle(centre + 1.0, BICUBIC, ANTIALIAS) + _keys_or_triangle(centre + 2.0, BICUBIC, ANTIALIAS)
        past = n0 - centre
        high = _keys_or_triangle(past, BICUBIC, ANTIALIAS) + _keys_or_triangle(past + 1.0, BICUBIC, ANTIALIAS)
        weight += tl.where(cell == 0, low, 0.0) + tl.where(cell == n0 - 1, high, 0.0)
    return weight


@triton.jit(do_not_specialize=["N", "coord_b", "coord_n", "coord_c"])
def plan_kernel(
    coord_ptr,
    plan_ptr,
    norm_ptr,
    N,
    coord_b,
    coord_n,
    coord_c,
    H0: tl.constexpr,
    W0: tl.constexpr,
    BICUBIC: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    AR_PRESERVING: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    H0_BLOCK: tl.constexpr,
):
    """One program per sample: its row of the plan; with NORMS also one over the sum of row y's antialiased weights."""
    sample = tl.program_id(0).to(tl.int64)
    coord_ptr += sample * coord_b
    highest_y = tl.full([BLOCK], -1, tl.int64)
    highest_x = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        at = coord_ptr + n.to(tl.int64) * coord_n
        highest_y = tl.maximum(highest_y, tl.load(at, mask=n < N, other=-1).to(tl.int64))
        highest_x = tl.maximum(highest_x, tl.load(at + coord_c, mask=n < N, other=-1).to(tl.int64))
    h = tl.max(highest_y, 0) + 1
    w = tl.max(highest_x, 0) + 1
    tokens = tl.minimum(h * w, N)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        at = coord_ptr + n.to(tl.int64) * coord_n
        y = tl.load(at, mask=n < tokens, other=0).to(tl.int64)
        x = tl.load(at + coord_c, mask=n < tokens, other=0).to(tl.int64)
        wrong += ((n < tokens) & ((y * w + x != n) | (x < 0))).to(tl.int32)
    misplaced = tl.sum(wrong, 0)
    to_h, to_w = h, w
    if AR_PRESERVING:
        as_is = (h == H0) & (w == W0)
        to_h = tl.where(as_is, h, tl.maximum(h, w))
        to_w = tl.where(as_is, w, tl.maximum(h, w))
    scale = _scale(to_h, H0, ALIGN_CORNERS)
    plan_ptr += sample * PLAN
    tl.store(plan_ptr, tokens.to(tl.int32))
    tl.store(plan_ptr + 1, w.to(tl.int32))
    tl.store(plan_ptr + 2, misplaced)
    tl.store(plan_ptr + 3, tl.where(misplaced == 0, to_w, 2147483647).to(tl.int32))
    tl.store(plan_ptr + 4, scale.to(tl.int32, bitcast=True))
    tl.store(plan_ptr + 5, _scale(to_w, W0, ALIGN_CORNERS).to(tl.int32, bitcast=True))
    if NORMS:
        rows = tl.where(misplaced == 0, tl.cdiv(tokens, tl.maximum(w, 1)), 0).to(tl.int32)
        shrink = 1.0 / _stretch(scale, True)
        cell = tl.arange(0, H0_BLOCK)[None, :]
        for start in range(0, rows, 16):
            y = start + tl.arange(0, 16)
            centre = _centre(y, scale, H0, BICUBIC, True, ALIGN_CORNERS)
            weights = _entry(cell, centre[:, None], shrink, H0, BICUBIC, True)
            total = tl.sum(tl.where(cell < H0, weights, 0.0), 1)
            tl.store(norm_ptr + sample * N + y, 1.0 / tl.where(y < rows, total, 1.0), mask=y < rows)


@triton.jit
def _add(x_ptr, n, ok, cells, c, in_c, x_n, x_c):
    """``x[n] += cells``, rounded to the dtype of ``x`` before the addition as timm does, and after it."""
    at = x_ptr + n.to(tl.int64)[:, None] * x_n + (c * x_c)[None, :]
    mask = ok[:, None] & in_c[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    tl.store(at, (x.to(tl.float32) + cells.to(x.dtype).to(tl.float32)).to(x.dtype), mask=mask)


@triton.jit(do_not_specialize=["splits", "coord_b", "coord_n", "coord_c"])
def forward_kernel(
    x_ptr,
    table_ptr,
    coord_ptr,
    plan_ptr,
    C,
    splits,
    x_b,
    x_n,
    x_c,
    coord_b,
    coord_n,
    coord_c,
    H0: tl.constexpr,
    W0: tl.constexpr,
    BICUBIC: tl.constexpr,
    ANTIALIAS: tl.constexpr,
    ALIGN_CORNERS: tl.constexpr,
    TOKENS: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Adds the table into ``x`` in place. Programs: (B * splits, blocks of CHANNELS)."""
    sample = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_c = c < C
    x_ptr += sample * x_b
    coord_ptr += sample * coord_b
    plan_ptr += sample * PLAN
    tokens = tl.load(plan_ptr)
    w = tl.load(plan_ptr + 1)
    misplaced = tl.load(plan_ptr + 2)
    scale_y = _read_scale(plan_ptr + 4)
    scale_x = _read_scale(plan_ptr + 5)
    if tokens > 0:
        if ANTIALIAS and misplaced == 0:
            _forward_lines(
                x_ptr, table_ptr, split, splits, c, in_c, C, x_n, x_c, w, scale_y, scale_x, tokens,
                H0, W0, BICUBIC, ALIGN_CORNERS, TOKENS, CELLS, CHANNELS,
            )  # fmt: skip
        else:
            _forward_tokens(
                x_ptr, table_ptr, coord_ptr, split, splits, c, in_c, C, x_n, x_c, coord_n, coord_c,
                scale_y, scale_x, tokens,
                H0, W0, BICUBIC, ANTIALIAS, ALIGN_CORNERS, TOKENS, CHANNELS,
            )  # fmt: skip


@triton.jit
def _forward_lines(
    x_ptr, table_ptr, split, splits, c, in_c, C, x_n, x_c, w, scale_y, scale_x, tokens,
    H0: tl.constexpr, W0: tl.constexpr, BICUBIC: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    TOKENS: tl.constexpr, CELLS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A sample in row-major order, antialiased: line by line of its grid.

    Lines are the rows, or the columns where these are fewer. For TOKENS cells of a line, the part of the table that
    they see is contracted across the line, CELLS cells at a time, tap by tap; then along it by a product.
    """
    RADIUS: tl.constexpr = 2.0 if BICUBIC else 1.0
    TAPS: tl.constexpr = 4 if BICUBIC else 2
    rows = tl.cdiv(tokens, w)
    cols = tl.minimum(w, tokens)
    by_column = cols < rows
    lines = tl.minimum(rows, cols)
    length = tl.maximum(rows, cols)
    token_step = tl.where(by_column, w, 1)  # from a token to the next one of its line
    line_step = tl.where(by_column, 1, w)
    cell_step = tl.where(by_column, W0, 1) * C
    across_step = tl.where(by_column, 1, W0) * C
    across0 = tl.where(by_column, W0, H0)
    along0 = tl.where(by_column, H0, W0)
    across_scale = tl.where(by_column, scale_x, scale_y)
    along_scale = tl.where(by_column, scale_y, scale_x)
    across_stretch = _stretch(across_scale, True)
    along_stretch = _stretch(along_scale, True)
    across_shrink = 1.0 / across_stretch
    along_shrink = 1.0 / along_stretch
    across_reach = RADIUS * across_stretch
    along_reach = RADIUS * along_stretch
    for line in range(split, lines, splits):
        across = _centre(line, across_scale, across0, BICUBIC, True, ALIGN_CORNERS)
        first_tap = tl.maximum(tl.floor(across - across_reach).to(tl.int32) + 1, 0)
        taps_end = tl.minimum(tl.ceil(across + across_reach).to(tl.int32), across0)
        for start in range(0, length, TOKENS):
            t = start + tl.arange(0, TOKENS)
            end = tl.minimum(start + TOKENS, length) - 1
            along = _centre(t, along_scale, along0, BICUBIC, True, ALIGN_CORNERS)
            low = _centre(start, along_scale, along0, BICUBIC, True, ALIGN_CORNERS) - along_reach
            high = _centre(end, along_scale, along0, BICUBIC, True, ALIGN_CORNERS) + along_reach
            first_cell = tl.maximum(tl.floor(low).to(tl.int32) + 1, 0)
            cells_end = tl.minimum(tl.ceil(high).to(tl.int32), along0)
            total = tl.zeros([TOKENS], tl.float32)
            across_total = across * 0.0
            embedding = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for cells_start in range(first_cell, cells_end, CELLS):
                cell = cells_start + tl.arange(0, CELLS)
                at = table_ptr + (cell * cell_step)[:, None] + c[None, :]
                strip = tl.zeros([CELLS, CHANNELS], tl.float32)
                across_total = across * 0.0
                for tap0 in range(first_tap, taps_end, TAPS):
                    for k in tl.static_range(TAPS):  # so many loads are on their way at once
                        tap = tap0 + k
                        weight = _entry(tap, across, across_shrink, across0, BICUBIC, True)
                        weight = tl.where(tap < taps_end, weight, 0.0)
                        seen = cell < tl.where(tap < taps_end, cells_end, 0)
                        mask = seen[:, None] & in_c[None, :]
                        values = tl.load(at + tap * across_step, mask=mask, other=0.0)
                        strip = strip + weight * values.to(tl.float32)
                        across_total += weight
                weights = _entry(cell[None, :], along[:, None], along_shrink, along0, BICUBIC, True)
                weights = tl.where((cell < cells_end)[None, :], weights, 0.0)
                total += tl.sum(weights, 1)
                embedding = tl.dot(weights, strip, embedding, input_precision="ieee")
            n = line * line_step + t * token_step
            ok = (t < length) & (n < tokens)
            embedding = embedding / (tl.where(ok, total, 1.0) * across_total)[:, None]
            _add(x_ptr, n, ok, embedding, c, in_c, x_n, x_c)


@triton.jit
def _forward_tokens(
    x_ptr, table_ptr, coord_ptr, split, splits, c, in_c, C, x_n, x_c, coord_n, coord_c, scale_y, scale_x, tokens,
    H0: tl.constexpr, W0: tl.constexpr, BICUBIC: tl.constexpr, ANTIALIAS: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A sample in any order, token by token: each gathers the table's cells within its reach on both axes.

    Without antialiasing these are 4, or 16 in bicubic tables, which is cheaper than a product over a line.
    """
    RADIUS: tl.constexpr = 2.0 if BICUBIC else 1.0
    stretch_y = _stretch(scale_y, ANTIALIAS)
    stretch_x = _stretch(scale_x, ANTIALIAS)
    shrink_y = 1.0 / stretch_y
    shrink_x = 1.0 / stretch_x
    taps_y = tl.ceil(2.0 * RADIUS * stretch_y).to(tl.int32)
    taps_x = tl.ceil(2.0 * RADIUS * stretch_x).to(tl.int32)
    for start in range(split * TOKENS, tokens, splits * TOKENS):
        n = start + tl.arange(0, TOKENS)
        at = coord_ptr + n.to(tl.int64) * coord_n
        y = tl.load(at, mask=n < tokens, other=0).to(tl.int32)
        x = tl.load(at + coord_c, mask=n < tokens, other=0).to(tl.int32)
        centre_y = _centre(y, scale_y, H0, BICUBIC, ANTIALIAS, ALIGN_CORNERS)
        centre_x = _centre(x, scale_x, W0, BICUBIC, ANTIALIAS, ALIGN_CORNERS)
        first_y = tl.floor(centre_y - RADIUS * stretch_y).to(tl.int32) + 1
        first_x = tl.floor(centre_x - RADIUS * stretch_x).to(tl.int32) + 1
        total_y = tl.zeros([TOKENS], tl.float32)
        total_x = tl.zeros([TOKENS], tl.float32)
        embedding = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for k in range(taps_y):
            row = first_y + k
            weight_y = _keys_or_triangle(tl.abs(row - centre_y) * shrink_y, BICUBIC, ANTIALIAS)
            if ANTIALIAS:
                weight_y = tl.where((row >= 0) & (row < H0), weight_y, 0.0)
            row = tl.minimum(tl.maximum(row, 0), H0 - 1) * W0
            part = tl.zeros([TOKENS, CHANNELS], tl.float32)
            total_x = tl.zeros([TOKENS], tl.float32)
            for m in range(taps_x):
                col = first_x + m
                weight_x = _keys_or_triangle(tl.abs(col - centre_x) * shrink_x, BICUBIC, ANTIALIAS)
                if ANTIALIAS:
                    weight_x = tl.where((col >= 0) & (col < W0), weight_x, 0.0)
                cell = row + tl.minimum(tl.maximum(col, 0), W0 - 1)
                values = tl.load(table_ptr + (cell * C)[:, None] + c[None, :], mask=in_c[None, :], other=0.0)
                part = part + weight_x[:, None] * values.to(tl.float32)
                total_x += weight_x
            embedding = embedding + weight_y[:, None] * part
            total_y += weight_y
        if ANTIALIAS:
            embedding = embedding / (total_y * total_x)[:, None]
        embedding = tl.where(((y < 0) | (x < 0))[:, None], float("nan"), embedding)
        _add(x_ptr, n, n < tokens, embedding, c, in_c, x_n, x_c)
