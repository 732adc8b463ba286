"""docs/conventions.svg: the widths of its lines are PyTorch's weights."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

PICTURE = (Path(__file__).parents[2] / "docs" / "conventions.svg").read_text()
WAYS = [{"antialias": True}, {}, {"align_corners": True}]  # from the top to the bottom
CELL = 40
CELLS = 8
WIDTH_OF_1 = 12  # of a line with this weight


@pytest.mark.parametrize("row", range(3))
def test_lines_are_as_wide_as_the_weights(row):
    top = 20 + 138 * row
    drawn = torch.zeros(3, CELLS)
    for x1, y1, x2, width in re.findall(
        r'<line x1="(.*?)" y1="(.*?)" x2="(.*?)" y2=".*?" stroke="#1a7f37" stroke-width="(.*?)"/>',
        PICTURE,
    ):
        if int(y1) == top + 78:
            drawn[int(3 * float(x1) / (CELLS * CELL)), int(float(x2) / CELL)] = float(width)

    units = torch.eye(CELLS)[:, None, None]
    weights = F.interpolate(units, size=(1, 3), mode="bilinear", **WAYS[row])[:, 0, 0].T
    torch.testing.assert_close(drawn / WIDTH_OF_1, weights, rtol=0, atol=0.006)


def test_a_cell_is_white_where_no_line_ends():
    white = re.findall(r'<rect x="(\d+)" y="(\d+)" [^/]* fill="#ffffff"', PICTURE)
    ends = set(re.findall(r'x2="(.*?)" y2="(\d+)"', PICTURE))
    cells = re.findall(r'<rect x="(\d+)" y="(\d+)" width="36"', PICTURE)
    assert len(cells) == 3 * CELLS
    for x, y in cells:
        is_read = (f"{int(x) + 18:.1f}", str(int(y) + 26)) in ends
        assert is_read is ((x, y) not in white)
    assert white
