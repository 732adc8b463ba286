"""The fields that docs/json.md names: each command's test compares what it writes with them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"


def named(section):
    """The fields that a section names."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return {*re.findall(r"`([^`]+)`", text)}
