"""Tables of text, for terminals."""

import re
from collections.abc import Mapping, Sequence


def table(lines: Sequence[Mapping[str, str]]) -> str:
    """Cells under their headings, "-" for one that is not there; columns of figures stand to the
    right, words left."""
    columns = []
    for heading in dict.fromkeys(heading for line in lines for heading in line):
        cells = [line.get(heading, "-") for line in lines]
        side = ">" if all(re.match(r"[-<\d]", cell) for cell in cells) else "<"
        width = max(map(len, [heading, *cells]))
        columns.append([f"{cell:{side}{width}}" for cell in [heading, *cells]])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns))
