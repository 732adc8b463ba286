"""What a report says about a survey: an answer, a table, its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....names import STRATEGY_NAMES
from ..output import to_json
from .survey import Survey, is_exact, why_unknown

HEADINGS = {
    "embed_rel_rms": "tokens, RMS",
    "embed_max_abs": "tokens, largest",
    "pooled_cosine_distance": "output, 1 - cosine",
    "neighbours": "same nearest image",
    "agreement": "same class",
    "accuracy": "accuracy",
}
# The other columns are shares.
NUMBERS = ("embed_max_abs", "pooled_cosine_distance")


def headline(survey: Survey) -> str:
    """The answer in a sentence: which modes of this package gave timm's result on these images.

    Of a mode that these images cannot tell, no answer is given, but the reason.
    """
    said: dict[str, list[str]] = {
        "equal to timm but for rounding": [],
        "not equal": [],
        "no answer": [],
    }
    for name in STRATEGY_NAMES:
        if name not in survey["drift"]:
            continue
        why = why_unknown(survey, name)
        if not is_exact(survey, name):
            off = percent(survey["drift"][name]["embed_rel_rms"])
            said["not equal"].append(f"`{name}` (tokens off by {off}, RMS)")
        elif why:
            said["no answer"].append(f"`{name}` ({why})")
        else:
            said["equal to timm but for rounding"].append(f"`{name}`")
    answer = f"{survey['images']:,} images"
    for words, names in said.items():
        if names:
            answer += f"; {words}: {', '.join(names)}"
    return answer


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
        line = {"mode": name}
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


def write(record: Mapping[str, Any], folder: str | Path) -> None:
    """Write report.json and report.html into ``folder``.

    Args:
        record: what report.json holds: see docs/json.md.
        folder: is there.

    Raises:
        OSError: one cannot be written.
    """
    from jinja2 import Template

    from .plots import curves, svg

    survey = record["survey"]
    plots = {}
    for name in survey["drift"]:
        # A mode that gives timm's result has no difference to show.
        if not is_exact(survey, name):
            plots[name] = svg(curves(survey["grids"], [name]))
    form = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = Template(form, autoescape=True).render(record, rows=rows(survey), plots=plots)
    Path(folder, "report.json").write_text(to_json(record), encoding="utf-8")
    html = Path(folder, "report.html")
    html.write_text(page, encoding="utf-8", errors="backslashreplace")
