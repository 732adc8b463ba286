"""What a report says about a survey: an answer, a table, its files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....names import STRATEGY_NAMES
from ..contenders import CONTENDERS
from ..output import number, to_json
from . import FILES
from .survey import Drift, Survey

HEADINGS = {
    "embed_max_abs": "embedding, largest difference",
    "embed_rel_rms": "embedding, relative RMS",
    "pooled_cosine_distance": "output, cosine distance",
    "agreement": "same class",
    "accuracy": "accuracy",
}
# The other columns are shares.
NUMBERS = ("embed_max_abs", "pooled_cosine_distance")


def headline(survey: Survey) -> str:
    """The answer in sentences: which strategies gave timm's own result on these images.

    Each with the number that decided, the largest difference of an element over what rounding
    explains there. Of a strategy that these images cannot tell, no answer is given, but the reason.
    """
    images = f"{survey.images:,} image"
    if survey.images != 1:
        images += "s"
    answers: dict[tuple[str, str], list[str]] = {}  # by the words before and after the names
    for name in reversed(STRATEGY_NAMES):
        if name not in survey.drift:
            continue
        drift = survey.drift[name]
        decided = f"{number(drift.embed_roundings)} times what rounding explains"
        if drift.embed_roundings == 0:
            decided = "no difference"
        why = survey.unknown(name)
        if not survey.exact(name):
            answer = (f"Another result on {images}", "")
            said = f"`{name}` ({decided}, RMS {percent(drift.embed_rel_rms)})"
        elif why:
            answer = (f"Not known from {images}", f" ({why})")
            said = f"`{name}`"
        else:
            answer = (f"Timm's result on {images}", "")
            said = f"`{name}` ({decided})"
        answers.setdefault(answer, []).append(said)
    sentences = []
    for (before, after), names in answers.items():
        sentences.append(f"{before}: {', '.join(names)}{after}")
    return ". ".join(sentences) or "No strategy of this package was measured"


def percent(value: float) -> str:
    """A share as text: "11.87 %"; "0 %" is exactly nothing, "< 0.01 %" nearly nothing."""
    if value == 0:
        return "0 %"
    if 0 < value < 5e-5:
        return "< 0.01 %"
    return f"{100 * value:.2f} %"


def cells(name: str, drift: Drift) -> dict[str, str]:
    """A mode's line in every table, by heading; without what was not measured."""
    line = {"mode": name, "what it is": CONTENDERS[name]}
    for key, heading in HEADINGS.items():
        value = getattr(drift, key)
        if value is not None:
            line[heading] = f"{value:.2g}" if key in NUMBERS else percent(value)
    return line


def rows(survey: Survey) -> list[dict[str, str]]:
    """The table, a line for each mode."""
    return [cells(name, drift) for name, drift in survey.drift.items()]


@dataclass(frozen=True)
class Report:
    """A survey, and what it was made of and with.

    Attributes:
        survey: what was measured.
        model: its name.
        weights: which weights it held, in words.
        facts: what was measured: {label: text}.
        made: command, date, machine and versions.
        skipped: the images that could not be read, each with the reason.
    """

    survey: Survey
    model: str
    weights: str
    facts: Mapping[str, str]
    made: Mapping[str, Any]
    skipped: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """What report.json holds: the figures, and what follows from them."""
        return {**asdict(self), "headline": headline(self.survey)}


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write report.json into ``folder``, and report.html from the template.

    Raises:
        OSError: one cannot be written; then none is, and what was there before stays.
    """
    from jinja2 import Environment, FileSystemLoader

    from . import plots

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = {
        **vars(report),
        "facts": {"weights": report.weights, **report.facts, **report.made},
        "headline": headline(report.survey),
        "rows": rows(report.survey),
        "plots": plots,
    }
    json_file, page = [Path(folder, name) for name in FILES]
    json_file.write_text(to_json(report.as_json()), encoding="utf-8")
    text = environment.get_template("report.html.j2").render(known)
    page.write_text(text, encoding="utf-8", errors="backslashreplace")
    return [json_file, page]
