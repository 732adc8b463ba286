"""The package's page in an index: README, whose links lead somewhere there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def links(text):
    """Where links of a page lead."""
    return re.findall(r"\]\(([^)]+)\)", text)


def test_with_an_address_every_link_is_absolute():
    from lab.tools.package_page import page

    found = links(page(README, "https://host.example/us"))
    assert len(found) == len(links(README)) > 0
    assert "https://host.example/us/blob/HEAD/ports/README.md" in found
    for link in found:
        assert link.startswith("https://")
        inside = re.fullmatch(r"https://host\.example/us/blob/HEAD/([^#]+).*", link)
        if inside:
            assert (ROOT / inside[1]).exists()


def test_without_an_address_no_link_leads_into_the_repository():
    from lab.tools.package_page import page

    shown = page(README, "")
    assert not [link for link in links(shown) if not link.startswith("https://")]
    assert "every\nquestion" in shown
