"""One weighted sum, four ways to write it, and what each costs.

Resampling a position table P (H0, W0, C) to a grid gives every grid cell a weighted sum of table
cells. The weights depend on the grid alone, so the same sum can be a loop, a grouped convolution, a
frozen 1x1 convolution, or a product.

uv run examples/four_forms.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import einx
import torch
import torch.nn.functional as F
from torch import Tensor

from timm_naflex_fast.functional import resize_matrix

Size = tuple[int, int]


def axes(size: Size, table: Tensor) -> list[Tensor]:
    """The matrices A_h (h, H0) and A_w (w, W0), which resize the two axes."""
    return [resize_matrix(n, n0, "bicubic") for n, n0 in zip(size, table.shape)]


def cell_weights(size: Size, table: Tensor) -> Tensor:
    """(h*w, H0*W0): what every table cell weighs in every grid cell."""
    return einx.dot("h h0, w w0 -> (h w) (h0 w0)", *axes(size, table))


def loop(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """A sum over the table cells, cell by cell."""
    cells, out = table.flatten(0, 1), []
    for size in sizes:
        rows = cell_weights(size, table)
        out.append(
            torch.stack(
                [sum(row[i] * cells[i] for i in row.nonzero().flatten().tolist()) for row in rows]
            )
        )
    return out


def grouped_conv1d(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """One conv1d for all samples: a group per sample, a kernel per grid cell, as long as the table
    has cells."""
    longest = max(h * w for h, w in sizes)
    kernels = [
        F.pad(k, (0, 0, 0, longest - len(k))) for k in (cell_weights(size, table) for size in sizes)
    ]
    signal = einx.id("h0 w0 c -> c b (h0 w0)", table, b=len(sizes))  # channels as the batch
    out = F.conv1d(signal, torch.cat(kernels)[:, None], groups=len(sizes))[..., 0]
    return [part.t()[: h * w] for part, (h, w) in zip(out.split(longest, 1), sizes)]


def frozen_1x1(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """A 1x1 convolution with fixed weights: table cells are input channels, grid cells output
    channels."""
    signal = table.flatten(0, 1)[None, :, :, None]  # (1, H0*W0, C, 1)
    return [
        F.conv2d(signal, cell_weights(size, table)[:, :, None, None])[0, :, :, 0] for size in sizes
    ]


def matmul(table: Tensor, sizes: list[Size]) -> list[Tensor]:
    """The definition, two small products: A_h P A_w^T."""
    matrices = [axes(size, table) for size in sizes]
    return [einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", a_h, table, a_w) for a_h, a_w in matrices]


def milliseconds(
    form: Callable[[Tensor, list[Size]], list[Tensor]], table: Tensor, sizes: list[Size]
) -> float:
    start = time.perf_counter()
    form(table, sizes)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds, forms interleaved; medians are shown"
    )
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    table = torch.randn(16, 16, 192)
    sizes = [(5, 7), (12, 4), (3, 9), (9, 9), (5, 7), (10, 6)]
    cells, taps = (
        table[..., 0].numel(),
        sum(int((cell_weights(size, table) != 0).sum()) for size in sizes),
    )
    tokens, channels = sum(h * w for h, w in sizes), table.shape[-1]
    separable = sum(w * cells + h * w * len(table) for h, w in sizes)
    costs = {
        loop: (taps, "only the taps, but each is an operation of its own"),
        grouped_conv1d: (
            len(sizes) * max(h * w for h, w in sizes) * cells,
            "every table cell for every padded token",
        ),
        frozen_1x1: (tokens * cells, "every table cell for every token"),
        matmul: (separable, "one axis, then the other"),
    }
    timed: dict[str, list[float]] = {form.__name__: [] for form in costs}
    with torch.no_grad():
        want = [
            F.interpolate(table.permute(2, 0, 1)[None], size=size, mode="bicubic", antialias=True)[
                0
            ]
            .flatten(1)
            .t()
            for size in sizes
        ]
        error = {
            form.__name__: max((a - b).abs().max().item() for a, b in zip(form(table, sizes), want))
            for form in costs
        }
        for _ in range(rounds):
            for form in costs:
                timed[form.__name__].append(milliseconds(form, table, sizes))
    print(
        f"table {tuple(table.shape)}, {len(sizes)} samples, {tokens} tokens, bicubic with antialias, float32"
    )
    print(
        f"{'form':<16}{'ms (median)':>12}{'Mmul-add':>10}{'max |diff| to F.interpolate':>30}   cost"
    )
    for form, (weights, why) in costs.items():
        name = form.__name__
        median, work = statistics.median(timed[name]), weights * channels / 1e6
        print(f"{name:<16}{median:>12.2f}{work:>10.2f}{error[name]:>30.1e}   {why}")


if __name__ == "__main__":
    main()
