"""Tables of text, for terminals.

Tests: tests/commands/measure/test_files.py.
"""

import re
from collections.abc import Mapping, Sequence

Line = Mapping[str, str]


def table(lines: Sequence[Line]) -> str:
    """Cells under their headings, "-" for one that is not there; columns of figures stand to the
    right, words left.
    """
    headings: dict[str, None] = {}  # in the order in which they are met
    for line in lines:
        headings |= dict.fromkeys(line)
    columns = [_column(heading, lines) for heading in headings]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns))


def _column(heading: str, lines: Sequence[Line]) -> list[str]:
    """A heading and the cells below it, equally wide."""
    cells = [line.get(heading, "-") for line in lines]
    # A figure begins with a digit, a sign or "<"; so does the dash of an empty cell.
    side = ">" if all(re.match(r"[-<\d]", cell) for cell in cells) else "<"
    width = max(map(len, [heading, *cells]))
    return [f"{cell:{side}{width}}" for cell in [heading, *cells]]
