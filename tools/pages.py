"""Write the tables of the pages and the picture of drift from results/: uv run tools/pages.py.

With --check nothing is written: pages that differ from the result files are an error, and what
`complaints` finds is listed. With --release that is an error too.

No figure is typed by hand. The entry NAME of SECTIONS makes what stands in a page between
`<!-- NAME: begin -->` and `<!-- NAME: end -->`. The command that made a result file stands in it.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from page_parts import sections
from page_parts.audit import complaints
from page_parts.interface import api
from page_parts.pictures import draw_conventions, draw_drift, draw_graphs
from page_parts.race_tables import RACES, race_table
from page_parts.results import RESULTS, ROOT

SECTIONS: dict[str, Callable[[], str]] = {
    "first_screen": sections.first_screen,
    "graphs": sections.graphs,
    "model_sentence": sections.model_sentence,
    "never_slower": sections.never_slower,
    "rounding": sections.rounding,
    "siglip2_sentence": sections.siglip2_sentence,
    "agreement": sections.agreement,
    "worked_example": sections.worked_example,
    "mistakes": sections.mistakes,
    "siglip2_figures": sections.siglip2_figures,
    "exported_sentence": sections.exported_sentence,
    "drift_peers": sections.drift_peers,
    "versions": sections.versions,
    "timm_tests": sections.timm_tests,
    "api": api,
    **{name: partial(race_table, name) for name in RACES},
}
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """``text`` with what is between the markers of each of its sections replaced."""
    for name, render in SECTIONS.items():
        begin = f"<!-- {name}: begin -->\n"
        end = f"\n<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            after = rest.split(end.strip())[1]
            text = head + begin + render() + end + after
    return text


def main() -> int:
    """Write the pages and the picture, or tell which pages are old."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; tell what is old")
    parser.add_argument(
        "--release", action="store_true", help="as --check; any complaint is an error"
    )
    options = parser.parse_args()
    new = {page: fill(page.read_text()) for page in PAGES}
    old = [page for page, text in new.items() if text != page.read_text()]

    if options.check or options.release:
        wrong = list(complaints())
        for page in old:
            print(f"{page.relative_to(ROOT)} is old: uv run tools/pages.py")
        for line in wrong:
            print(line)
        is_error = bool(old)
        if options.release and wrong:
            is_error = True
        return is_error

    for page in old:
        page.write_text(new[page])
    draw_drift()
    draw_graphs()
    draw_conventions()
    return 0


if __name__ == "__main__":
    sys.exit(main())
