"""docs/json.md names every field that the commands write, and no other."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support import tiny_siglip
from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.commands.measure.contenders import CONTENDERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
SMALL = ["--model", tiny_siglip.NAME, "--random-weights"]
# The keys of these are no fields: labels, modes, and what an exported file says of itself.
OPEN = {"facts", "metadata"}
# Named on the page, and not in these files: fields of other options, and names of values.
ABSENT = {
    "export": {"--out", "null"},
}


@cache
def fields_of(section):
    """What a section names in backquotes."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return set(re.findall(r"`([^`]+)`", text))


def keys_of(found):
    """All keys in what JSON holds, but those of open dictionaries and the names of modes."""
    if isinstance(found, list):
        return set().union(*map(keys_of, found))
    keys = set()
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in CONTENDERS:
                keys.add(key)
            if key not in OPEN:
                keys |= keys_of(value)
    return keys


def export(photos):
    return ["export", *SMALL, "--out", str(photos.with_name("m.pt2"))]


@pytest.mark.parametrize("command", [export])
def test_the_page_names_every_field(command, photos, tmp_path):
    assert main([*command(photos), "--json", str(tmp_path / "found.json")]) < 2

    found = keys_of(json.loads((tmp_path / "found.json").read_text()))

    named = fields_of(command.__name__)
    assert found - fields_of("Where figures come from") <= named
    assert named - found <= ABSENT.get(command.__name__, set())
