"""One weighted sum, four ways to write it, and what each costs.

Resampling a position table P (H0, W0, C) to a grid gives every grid cell a weighted sum of table
cells. The weights depend on the grid alone, so the same sum can be a loop, a grouped convolution, a
frozen 1x1 convolution, or a product.

    uv run examples/four_forms.py
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import einx
import torch
import torch.nn.functional as F
from torch import Tensor

from timm_naflex_fast.commands.measure.output import positive
from timm_naflex_fast.functional import resize_matrix

Size = tuple[int, int]
Form = Callable[[Tensor, list[Size]], list[Tensor]]


# What each form computes.
COSTS = {
    "loop": "only the taps, but each is an operation of its own",
    "grouped_conv1d": "every table cell for every padded token",
    "frozen_1x1": "every table cell for every token",
    "matmul": "one axis, then the other",
}


def axes(size: Size, table: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices A_h (h, H0) and A_w (w, W0), which resize the two axes."""
    h, w = size
    a_h = resize_matrix(h, table.shape[0], "bicubic")
    a_w = resize_matrix(w, table.shape[1], "bicubic")
    return a_h, a_w


def cell_weights(size: Size, table: Tensor) -> Tensor:
    """(h*w, H0*W0): what every table cell weighs in every grid cell."""
    a_h, a_w = axes(size, table)
    return einx.dot("h h0, w w0 -> (h w) (h0 w0)", a_h, a_w)


def loop(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """A sum over the table cells, cell by cell."""
    cells = table.flatten(0, 1)  # (H0*W0, C)
    grids = []
    for size in sizes:
        grid = []
        for weights in cell_weights(size, table):
            taps = weights.nonzero().flatten().tolist()
            grid.append(sum(weights[i] * cells[i] for i in taps))
        grids.append(torch.stack(grid))
    return grids


def grouped_conv1d(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """One conv1d for all samples: a group per sample, and a kernel per grid cell.

    A kernel is as long as the table has cells.
    """
    longest = max(h * w for h, w in sizes)
    kernels = []
    for size in sizes:
        weights = cell_weights(size, table)
        kernels.append(F.pad(weights, (0, 0, 0, longest - len(weights))))
    kernel = torch.cat(kernels)[:, None]  # (B*longest, 1, H0*W0)

    # The table's channels are the batch of the convolution, the samples its channels.
    signal = einx.id("h0 w0 c -> c b (h0 w0)", table, b=len(sizes))
    out = F.conv1d(signal, kernel, groups=len(sizes))[..., 0]  # (C, B*longest)
    grids = []
    for padded, (h, w) in zip(out.split(longest, 1), sizes):
        grids.append(padded.t()[: h * w])
    return grids


def frozen_1x1(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """A 1x1 convolution with fixed weights.

    Table cells are input channels, grid cells output channels.
    """
    signal = table.flatten(0, 1)[None, :, :, None]  # (1, H0*W0, C, 1)
    grids = []
    for size in sizes:
        kernel = cell_weights(size, table)[:, :, None, None]  # (h*w, H0*W0, 1, 1)
        grids.append(F.conv2d(signal, kernel)[0, :, :, 0])
    return grids


def matmul(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """The definition, two small products: A_h P A_w^T."""
    grids = []
    for size in sizes:
        a_h, a_w = axes(size, table)
        grids.append(einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", a_h, table, a_w))
    return grids


def interpolated(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """The same grids by F.interpolate, as timm computes them."""
    image = table.permute(2, 0, 1)[None]  # (1, C, H0, W0)
    grids = []
    for size in sizes:
        grid = F.interpolate(image, size=size, mode="bicubic", antialias=True)[0]  # (C, h, w)
        grids.append(grid.flatten(1).t())
    return grids


def multiplications(table: Tensor, sizes: list[Size]) -> dict[str, int]:
    """How many multiplications and additions each form needs."""
    height, width, channels = table.shape
    cells = height * width
    tokens = sum(h * w for h, w in sizes)
    longest = max(h * w for h, w in sizes)
    taps = sum(cell_weights(size, table).count_nonzero().item() for size in sizes)
    separable = sum(w * cells + h * w * height for h, w in sizes)
    return {
        "loop": taps * channels,
        "grouped_conv1d": len(sizes) * longest * cells * channels,
        "frozen_1x1": tokens * cells * channels,
        "matmul": separable * channels,
    }


def largest_difference(grids: list[Tensor], wanted: list[Tensor]) -> float:
    return max((grid - want).abs().max().item() for grid, want in zip(grids, wanted))


def milliseconds(form: Form, table: Tensor, sizes: list[Size]) -> float:
    start = time.perf_counter()
    form(table, sizes)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=positive, default=20, help="timed rounds, in each all forms (20)"
    )
    parser.add_argument("--threads", type=positive, default=1, help="of PyTorch (1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    table = torch.randn(16, 16, 192)
    sizes = [(5, 7), (12, 4), (3, 9), (9, 9), (5, 7), (10, 6)]
    forms = [loop, grouped_conv1d, frozen_1x1, matmul]

    errors = {}
    times = {form.__name__: [] for form in forms}
    with torch.no_grad():
        wanted = interpolated(table, sizes)
        for form in forms:
            errors[form.__name__] = largest_difference(form(table, sizes), wanted)
        for _ in range(options.rounds):
            # In a fixed order each would find the caches as the same predecessor left them.
            random.shuffle(forms)
            for form in forms:
                times[form.__name__].append(milliseconds(form, table, sizes))

    tokens = sum(h * w for h, w in sizes)
    work = multiplications(table, sizes)
    print(
        f"table {tuple(table.shape)}, {len(sizes)} samples, {tokens} tokens, "
        f"bicubic with antialias, float32; {options.threads} thread(s), {options.rounds} rounds"
    )
    headings = f"{'ms, median':>12}{'fastest':>9}{'slowest':>9}{'Mmul-add':>10}"
    print(f"{'form':<16}{headings}{'max |diff| to F.interpolate':>30}   cost")
    for name, why in COSTS.items():
        median = statistics.median(times[name])
        spread = f"{median:>12.2f}{min(times[name]):>9.2f}{max(times[name]):>9.2f}"
        print(f"{name:<16}{spread}{work[name] / 1e6:>10.2f}{errors[name]:>30.1e}   {why}")


if __name__ == "__main__":
    main()
