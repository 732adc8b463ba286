"""Write the tables of the pages and the pictures of drift from results/: uv run lab/tools/pages.py.

With --check nothing is written: it names the pages that differ from the result files, and that is
an error.

No figure is typed by hand, and no sentence stands in this code. What stands in a page between
`<!-- NAME: begin -->` and `<!-- NAME: end -->` is made by the function NAME of page_parts; below each
table stand the date, the commit and the command of its figures. Between `<!--NAME-->` and
`<!--/-->` stands a number of a sentence, that of ``sections.numbers``.
"""

import argparse
import re
import sys

from lab.tools.page_parts import races, sections
from lab.tools.page_parts.results import OURS, RESULTS, ROOT, read
from timm_naflex_fast.commands.measure.drift.report import render

SECTIONS = {**vars(sections), **vars(races)}
MARKED = re.compile(r"(<!-- (\w+): begin -->\n).*?(\n?<!-- \2: end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--(\w+)-->)[^<]*(?=<!--/-->)")
PAGES = (
    ROOT / "README.md",
    RESULTS / "README.md",
    RESULTS / "drift" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "ports" / "README.md",
)


def fill(text: str) -> str:
    """``text`` with what is between markers made anew."""
    text = MARKED.sub(lambda found: found[1] + SECTIONS[found[2]]() + "\n" + found[3].strip(), text)
    return NUMBER.sub(lambda found: found[1] + sections.numbers()[found[2]], text)


def draw_drift() -> None:
    """Draw the pictures of drift, on the digits and on photos."""
    names = ("grid_sample", OURS)
    for folder in ("digits", "photos"):
        report = read(f"drift/{folder}/report")
        picture = render("dots.svg.j2", grids=report["survey"]["grids"], names=names)
        (RESULTS / "drift" / folder / "drift.svg").write_text(picture)


def main() -> int:
    """Write the pages and the pictures, or tell which pages are old."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; tell what is old")
    options = parser.parse_args()

    is_old = False
    for page in PAGES:
        text = page.read_text()
        new = fill(text)
        if new == text:
            continue
        is_old = True
        if options.check:
            print(f"{page.relative_to(ROOT)} is old: uv run lab/tools/pages.py")
        else:
            page.write_text(new)
    if options.check:
        return int(is_old)
    draw_drift()
    return 0


if __name__ == "__main__":
    sys.exit(main())
