"""The README and the pages: links lead somewhere, and code runs as written.

That figures are those of the result files, CI asks by lab/tools/pages.py --check.
"""

import doctest
import re
from pathlib import Path

import pytest

import timm_naflex_fast
from lab.tools import pages
from timm_naflex_fast import functional
from timm_naflex_fast.patching.calls import STOCK
from timm_naflex_fast.pictures import patches_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FUNCTIONS = [getattr(timm_naflex_fast, name) for name in ("enable", "disable", "status")]
FUNCTIONS += [getattr(functional, name) for name in functional.__all__]
FUNCTIONS.append(patches_of)


def anchors_of(page):
    """What a link into a page can name: its headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]


def test_links_lead_somewhere_and_into_a_page_to_one_of_its_headings():
    headings = 0
    for page in (*ROOT.glob("*.md"), *pages.PAGES):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if "://" in link:
                continue
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            if heading:
                assert heading in anchors_of(target), f"{page.name}: {link}"
                headings += 1
            assert target.suffix != ".html", f"{page.name}: GitHub shows the source of {link}"
    assert headings > 10  # the pages have some, so the pattern finds them


def test_the_numbers_of_the_page_that_teaches_are_pytorchs(capsys):
    page = (ROOT / "docs" / "resampling.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code, {})
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.M)
    printed = re.findall(r"\[\[\[\[(.*?)\]\]\]\]", capsys.readouterr().out)
    assert len(promised) == len(printed) == 2
    for said, got in zip(promised, printed):
        assert [round(float(number), 2) for number in got.split(",")] == [
            float(number) for number in said.split(",")
        ]
        assert f"| {said} |" in page


def test_it_can_be_read_in_two_minutes_and_on_a_phone():
    assert len(README.split()) <= 700  # with those of tables and links
    assert len(README.splitlines()) <= 80
    code = "\n".join(re.findall(r"```\w+\n(.*?)```", README, re.S))
    assert max(map(len, code.splitlines())) <= 60
    tables = re.findall(r"^\|.*", README, re.M)
    assert max(row.count("|") for row in tables) <= 4  # three columns


def test_no_page_is_long():
    words = {page: len(page.read_text().split()) for page in pages.PAGES}
    assert sum(words[page] for page in words if page.parent.name == "docs") <= 7200
    assert words[ROOT / "ports" / "README.md"] <= 1800


def test_ci_runs_its_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^uv run [\w/.]+", README, re.M)
    assert len(commands) == 2
    for command in commands:
        assert command in ci


def code_of(page, language):
    """The last block of code in a language; of a diff, what is there afterwards."""
    text = (ROOT / page).read_text()
    *_, block = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    if language == "diff":
        block = re.sub("^[+ ] ", "", block, flags=re.M)
    return block


@pytest.mark.parametrize(
    ("page", "language"), [("README.md", "diff"), ("docs/export.md", "python")]
)
def test_use_runs_as_written(page, language):
    """But for a model of all its blocks."""
    code = code_of(page, language)
    exec(code.replace("create_model(name)", "create_model(name, depth=1)"), {})
    is_stock = timm_naflex_fast.status().flags == STOCK
    timm_naflex_fast.disable()
    assert not is_stock


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_examples_of_a_public_function_run(function):
    scope = dict(vars(functional), patches_of=patches_of)
    scope.update({name: getattr(functional, name) for name in functional.__all__})
    for name in timm_naflex_fast.__all__:
        scope[name] = getattr(timm_naflex_fast, name)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(function, function.__name__, globs=scope)
    assert test.examples
    assert not doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
