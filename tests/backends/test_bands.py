"""The bands that the Triton kernels read hold the CPU's weights, bit for bit."""

import pytest
import torch

from tests.support.oracles import NEW_TIMM
from timm_naflex_fast.backends.bands import ROWS, make_bands
from timm_naflex_fast.resampling.matrices import ResizeSpec, axis_matrix

LONGEST = 70


@pytest.mark.parametrize("sampler", ["interpolate", "grid_sample"])
@pytest.mark.parametrize("antialias", [True, False] if NEW_TIMM else [True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(5, 5), (1, 2), (3, 32), (9, 27)], ids=str)
def test_weights_are_the_cpus_bit_for_bit(size, corners, mode, antialias, sampler):
    spec = ResizeSpec(mode, antialias, corners, sampler=sampler)
    found = make_bands(size, spec, LONGEST)
    for axis, n0 in enumerate(size):
        for transposed in (False, True):
            bands = found[2 * transposed + axis]
            starts, taps = bands[: 2 * LONGEST].view(LONGEST, 2).unbind(1)
            firsts = iter(bands[ROWS:].tolist())
            for n in range(1, LONGEST + 1):
                want = axis_matrix(axis, n, n, n0, spec)
                want = want.t() if transposed else want
                count = int(taps[n - 1])
                assert transposed or count <= found.most_taps
                assert transposed or n0 % 2 or count % 2 == 0  # taken two at a time
                weights = found.weights[starts[n - 1] :][: len(want) * count].view(len(want), count)
                got = torch.zeros_like(want)
                for row, weight in zip(got, weights):
                    first = next(firsts)
                    row[first : first + count] = weight
                assert torch.equal(got, want)
            assert next(firsts, None) is None
