"""What a report says about a survey: an answer, a table, its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....names import BASELINE, STRATEGY_NAMES
from ..output import to_json, written_whole
from .survey import Survey, is_exact, why_unknown

HEADINGS = {
    "embed_rel_rms": "tokens, RMS",
    "embed_max_abs": "tokens, largest",
    "pooled_cosine_distance": "output, 1 - cosine",
    "neighbours": "same nearest image",
    "agreement": "same class",
    "accuracy": "accuracy",
}
# The verdicts on a mode.
EQUAL = "✓ but for rounding"
DIFFERENT = "✗ no"
UNKNOWN = "no answer"
# The other columns are shares.
NUMBERS = ("embed_max_abs", "pooled_cosine_distance")


def headline(survey: Survey) -> str:
    """The answer in a sentence: which modes of this package gave timm's result on these images.

    Of a mode that these images cannot tell, no answer is given, but the reason.
    """
    said = []
    for name in STRATEGY_NAMES:
        if name not in survey["drift"]:
            continue
        answer = verdict(survey, name)
        if answer == DIFFERENT:
            off = percent(survey["drift"][name]["embed_rel_rms"])
            answer += f" (tokens off by {off}, RMS)"
        elif answer == UNKNOWN:
            answer += f" ({why_unknown(survey, name)})"
        said.append(f"`{name}` {answer}")
    plural = "s" * (survey["images"] > 1)
    return f"Timm's result on {survey['images']:,} image{plural}? {'; '.join(said)}"


def verdict(survey: Survey, name: str) -> str:
    """Whether a mode gave timm's result on these images."""
    if name == BASELINE:
        return "itself"
    if not is_exact(survey, name):
        return DIFFERENT
    if why_unknown(survey, name):
        return UNKNOWN
    return EQUAL


def percent(value: float) -> str:
    """A share as text: "11.87 %"; "0 %" is exactly nothing, "< 0.01 %" nearly nothing."""
    if value == 0:
        return "0 %"
    if value < 5e-5:
        return "< 0.01 %"
    return f"{100 * value:.2f} %"


def rows(survey: Survey) -> list[dict[str, str]]:
    """The table, a line for each mode: by heading, without what was not measured."""
    lines = []
    for name, drift in survey["drift"].items():
        line = {"mode": name, "timm's result": verdict(survey, name)}
        for key, heading in HEADINGS.items():
            value = drift[key]
            if value is None:
                continue
            if key in NUMBERS:
                line[heading] = f"{value:.2g}"
            elif key == "neighbours":
                same = round(value * survey["images"])
                line[heading] = f"{same:,} of {survey['images']:,}"
            else:
                line[heading] = percent(value)
        lines.append(line)
    return lines


def render(template: str, **values: Any) -> str:
    """One of the templates beside this file, filled with these values."""
    from jinja2 import Environment, FileSystemLoader

    forms = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    forms.filters["percent"] = percent
    return forms.get_template(template).render(values)


def write(record: Mapping[str, Any], folder: str | Path) -> None:
    """Write report.json and report.html into ``folder``.

    Args:
        record: what report.json holds: see docs/json.md.
        folder: is there.

    Raises:
        OSError: one cannot be written.
    """
    page = render("report.html.j2", **record, rows=rows(record["survey"]))
    # Both or none.
    with written_whole(Path(folder, "report.html")) as html:
        html.write_text(page, encoding="utf-8", errors="backslashreplace")
        html.with_name("report.json").write_text(to_json(record), encoding="utf-8")
