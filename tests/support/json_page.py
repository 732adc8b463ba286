"""The fields that docs/json.md names: each command's test compares what it writes with them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"


def named(section, end="## "):
    """The fields that a section names, up to the line that begins with ``end``."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^{end}|\Z)", PAGE.read_text(), re.M | re.S)
    return {*re.findall(r"`([^`]+)`", text)}
