"""Tables of text, for terminals.

Tests: tests/measure/test_files.py.
"""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence

Line = Mapping[str, str]


def table(lines: Sequence[Line]) -> str:
    """Cells under their headings, "-" for one that is not there; columns of figures stand to the
    right, words left.

    A table that is wider than the terminal becomes a list. Where no terminal's width is known
    (a file, a pipe), it is never too wide.
    """
    headings: dict[str, None] = {}  # in the order in which they are met
    for line in lines:
        headings |= dict.fromkeys(line)
    columns = [_column(heading, lines) for heading in headings]
    rows = ["  ".join(row).rstrip() for row in zip(*columns)]
    width = max(map(len, rows), default=0)
    room = shutil.get_terminal_size(fallback=(width, 0)).columns
    if width > room:
        return "\n".join(_listed(line, room) for line in lines)
    return "\n".join(rows)


def _column(heading: str, lines: Sequence[Line]) -> list[str]:
    """A heading and the cells below it, equally wide."""
    cells = [line.get(heading, "-") for line in lines]
    # A figure begins with a digit, a sign or "<"; so does the dash of an empty cell.
    side = ">" if all(re.match(r"[-<\d]", cell) for cell in cells) else "<"
    width = max(map(len, [heading, *cells]))
    return [f"{cell:{side}{width}}" for cell in [heading, *cells]]


def _listed(line: Line, room: int) -> str:
    """A line of a table as a list: its first cell, and below it each other with its heading."""
    (_, first), *others = line.items()
    parts = textwrap.wrap(first, room)
    for heading, cell in others:
        text = f"{heading}: {cell}" if heading else cell
        parts += textwrap.wrap(text, room, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(parts)
