"""What the commands print and write: words that a terminal may show, tables, files.

Tests: ports/tests/cli/test_main.py, test_compare.py.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory


def printable(text: object) -> str:
    """Text on one line of a terminal.

    Control characters, line ends and bytes that are no text become escapes.
    """
    characters = []
    for character in str(text):
        if not character.isprintable():
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)


def write_whole(file: Path, text: str) -> None:
    """Write beside ``file``, then take its place.

    Raises:
        OSError: it cannot be written (no such folder, a full disk); what was there stays.
    """
    try:
        # Nothing can take the place of a terminal or a pipe.
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")
            return
        place = file.resolve()  # a link stays one
        with TemporaryDirectory(dir=place.parent, prefix=".vit-ports-") as folder:
            made = Path(folder, place.name)
            made.write_text(text, encoding="utf-8")
            made.replace(place)
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}; nothing is changed") from error


def table(lines: Sequence[Mapping[str, str]]) -> str:
    """Cells under their headings; figures stand to the right, words to the left."""
    columns = []
    for heading in lines[0]:
        cells = [line[heading] for line in lines]
        side = ">" if all(re.match(r"\d", cell) for cell in cells) else "<"
        width = max(map(len, [heading, *cells]))
        columns.append([f"{cell:{side}{width}}" for cell in [heading, *cells]])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns))


def marked(text: str) -> str:
    """A table whose lines begin with ✓ or ✗, as stdout shows it.

    Green or red on a terminal, and without these two signs in an encoding that lacks them.
    """
    try:
        "✓✗".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return re.sub("(?m)^[✓✗ ] ", "", text)
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        text = re.sub("(?m)^(✓ ok)", "\x1b[32m\\1\x1b[0m", text)
        text = re.sub("(?m)^(✗ parts)", "\x1b[31m\\1\x1b[0m", text)
    return text
