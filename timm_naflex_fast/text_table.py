"""Tables of text, for terminals.

Tests: tests/commands/measure/test_files.py.
"""

import re
from collections.abc import Mapping, Sequence

Line = Mapping[str, str]


def table(lines: Sequence[Line]) -> str:
    """Cells under their headings, "-" for one that is not there; figures stand to the right, words
    left.
    """
    headings = dict.fromkeys(heading for line in lines for heading in line)
    columns = []
    for heading in headings:
        cells = [line.get(heading, "-") for line in lines]
        # A figure begins with a digit, a sign or "<"; so does the dash of an empty cell.
        side = ">" if all(re.match(r"[-<\d]", cell) for cell in cells) else "<"
        width = max(map(len, [heading, *cells]))
        columns.append([f"{cell:{side}{width}}" for cell in [heading, *cells]])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns))
