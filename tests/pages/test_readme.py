"""The README: its figures are those of the committed result file, its commands and names exist."""

import doctest
import re
from pathlib import Path

import pages
import pytest

import timm_naflex_fast
from timm_naflex_fast import functional
from timm_naflex_fast.patching.choices import STOCK

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
NAMES = dict.fromkeys(("enable", "disable", "status"), timm_naflex_fast) | dict.fromkeys(
    functional.__all__, functional
)


def test_figures_come_from_the_result_file():
    assert len(pages.PAGES) > 5
    for page in pages.PAGES:
        assert pages.fill(page.read_text()) == page.read_text(), f"{page.name}: run tools/pages.py"
    text = "".join(page.read_text() for page in pages.PAGES)
    assert {*pages.SECTIONS} == set(re.findall(r"<!-- (\w+): begin -->", text))


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_it_can_be_read_in_two_minutes_and_ci_runs_its_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(
        command in ci for command in re.findall(r"pip install uv && (uv run [\w/.]+)", README)
    )
    assert len(README.split()) <= 800


@pytest.mark.parametrize(
    ("page", "language"),
    [("README.md", "diff"), ("README.md", "python"), ("docs/export.md", "python")],
)
def test_use_runs_as_written(page, language):
    (block,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)
    block = re.sub("^[+ ] ", "", block, flags=re.M) if language == "diff" else block
    exec(block.replace('.v2_webli", pretrained=True', '", depth=1'), {})
    assert (timm_naflex_fast.status().flags == STOCK) == ("disable()  #" in block)
    timm_naflex_fast.disable()


def test_the_table_of_modes_names_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "what-works.md").read_text()))
    sources = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert len(named) >= 15 and named <= set(re.findall(r"^def (test_\w+)", sources, re.M))


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_public_function_run(name):
    scope = {
        **vars(functional),
        **{n: getattr(timm_naflex_fast, n) for n in timm_naflex_fast.__all__},
    }
    (test,) = doctest.DocTestFinder(recurse=False).find(
        getattr(NAMES[name], name), name, globs=scope
    )
    assert (
        test.examples and not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
    )
