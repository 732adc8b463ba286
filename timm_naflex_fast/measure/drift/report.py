"""What a report says about a survey: an answer, a table, its files."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...names import STRATEGY_NAMES
from ..against import LIMITS, stage_rows
from ..contenders import CONTENDERS
from ..output import to_json, write_files
from . import FILES
from .survey import Drift, Survey

HEADINGS = {
    "embed_max_abs": "embedding, largest difference",
    "embed_rel_rms": "embedding, relative RMS",
    "pooled_cosine_distance": "output, cosine distance",
    "neighbours": "same nearest image",
    "agreement": "same class",
    "accuracy": "accuracy",
}
NUMBERS = ("embed_max_abs", "pooled_cosine_distance")  # the other columns are shares
TIES = (
    "A nearest image or a class counts as timm's own too where timm's result itself cannot tell "
    "the two apart: its distance (of outputs scaled to length 1) or its logit is within rounding "
    "of its best. So copies of a picture, which tie, do not count as a change."
)


def headline(survey: Survey) -> str:
    """The answer in one line: to which strategies one may switch, those first."""
    measured = [name for name in reversed(STRATEGY_NAMES) if name in survey.drift]
    answers = [f"`{name}`: yes" for name in measured if survey.exact(name)]
    answers += [f"`{name}`: no" for name in measured if not survey.exact(name)]
    if not answers:
        return "No strategy of this package was measured"
    return f"Safe to switch to {'; '.join(answers)}"


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


def record(survey: Survey, **about: Any) -> dict[str, Any]:
    """What report.json holds: the figures without the pictures, and what follows from them.

    Args:
        survey: what was measured.
        about: what it was made of and with:

            - model: its name.
            - weights: which weights it held, in words.
            - facts: what was measured: {label: text}.
            - made: command, date, machine and versions.
            - skipped: the images that could not be read, each with the reason.
            - against: what :func:`against_transformers` found; None if it was not asked.
    """
    figures = asdict(survey)
    del figures["pictures"]
    return {**about, "survey": figures, "headline": headline(survey)}


def write(report: dict[str, Any], survey: Survey, folder: str | Path) -> list[Path]:
    """Write report.json into ``folder``, and report.md and report.html from the templates.

    Raises:
        OSError: one cannot be written; then none is, and what was there before stays.
    """
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    from . import plots

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = {
        **report,
        "facts": {"weights": report["weights"], **report["facts"], **report["made"]},
        "rows": [cells(name, drift) for name, drift in survey.drift.items()],
        "survey": survey,
        "ties": TIES,
        "plots": plots,
        "stage_rows": stage_rows,
        "limits": LIMITS,
    }
    json_file, *pages = [Path(folder, name) for name in FILES]
    texts = {json_file: to_json(report)}
    for page in pages:
        template = environment.get_template(f"{page.name}.j2")
        texts[page] = template.render(known)
    write_files(texts)
    return list(texts)
