"""What a report says about a survey: sentences, a table, its files."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...names import STRATEGY_NAMES
from ..contenders import BASELINE, CONTENDERS
from ..output import write_json, write_text
from . import FILES
from .survey import Drift, Survey

HEADINGS = {
    "embed_max_abs": "embedding, largest difference",
    "embed_rel_rms": "embedding, relative RMS",
}
HEADINGS |= {
    "pooled_cosine_distance": "output, cosine distance",
    "neighbours": "same nearest image",
}
HEADINGS |= {"agreement": "same class", "accuracy": "accuracy"}


def headline(survey: Survey) -> str:
    """The answer in one line: to which of this package's strategies one may switch, those first."""
    names = [name for name in reversed(STRATEGY_NAMES) if name in survey.drift]
    answers = [f"`{name}`: yes" for name in names if survey.exact(name)]
    answers += [f"`{name}`: no" for name in names if not survey.exact(name)]
    return (
        f"Safe to switch to {'; '.join(answers)}"
        if answers
        else "No strategy of this package was measured"
    )


def verdict(survey: Survey, untrained: bool = False) -> str:
    """The figures behind the answer, in one sentence; ``untrained`` adds that trained weights may
    differ."""
    parts = [_sentence(survey, name) for name in STRATEGY_NAMES if name in survey.drift]
    sentence = f"On {survey.images:,} image{'s' * (survey.images != 1)}, {'; '.join(parts) or 'nothing was compared'}"
    return sentence + (
        "; these weights are random, a trained model may differ." if untrained else "."
    )


def _sentence(survey: Survey, name: str) -> str:
    drift, baseline = survey.drift[name], survey.drift[BASELINE]
    if survey.exact(name):
        most = drift.embed_max_abs
        phrase = f"but for rounding (embeddings within {most:.1e})" if most else "bit for bit"
        return f"{name} gives timm's own result {phrase}"
    words = [f"{name} moves the embeddings by {percent(drift.embed_rel_rms)} (RMS)"]
    if drift.neighbours < 1:
        words.append(
            f"gives {percent(1 - drift.neighbours)} of the images another nearest neighbour"
        )
    if drift.accuracy is not None and baseline.accuracy is not None:
        words.append(
            f"takes accuracy from {percent(baseline.accuracy)} to {percent(drift.accuracy)}"
        )
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def percent(value: float) -> str:
    """A share as text: "11.87 %"; "0 %" is exactly nothing, "< 0.01 %" nearly nothing."""
    return "0 %" if not value else "< 0.01 %" if 0 < value < 5e-5 else f"{100 * value:.2f} %"


def columns(baseline: Drift) -> dict[str, str]:
    """Headings of the table of contenders, by the field of :class:`Drift`; a model without classes
    has no such ones."""
    return {key: heading for key, heading in HEADINGS.items() if getattr(baseline, key) is not None}


def row_text(drift: Drift, keys: Iterable[str]) -> list[str]:
    """A contender's figures under these :func:`columns`, the same text in every table."""
    numbers = ("embed_max_abs", "pooled_cosine_distance")
    return [
        f"{getattr(drift, key):.2g}" if key in numbers else percent(getattr(drift, key))
        for key in keys
    ]


def markdown(text: object) -> str:
    """Text that stands in a Markdown page as it is: no markup, no HTML, no link, no list."""
    marks = r"[\\`*_\[\]<>&|#~$@]|(?<=www)\.|:(?=//)|^[-+=]"
    return re.sub(
        r"^(\d+)([.)])", r"\1\\\2", re.sub(f"({marks})", r"\\\1", str(text).strip(), flags=re.I)
    )


def record(survey: Survey, **about: Any) -> dict[str, Any]:
    """What report.json holds: the figures without the pictures, and what follows from them in
    words.

    Args:
        survey: what was measured.
        about: what it was made of and with:

            - model: its name.
            - weights: which weights it held, in words; those that begin with "random" are not
              trained ones.
            - facts: what was measured: {label: text}.
            - notes: what a reader must know besides, in sentences.
            - made: command, date, machine and versions.
            - skipped: the images that could not be read, each with the reason.
    """
    figures = asdict(survey)
    del figures["pictures"]
    words = {
        "headline": headline(survey),
        "verdict": verdict(survey, about["weights"].startswith("random")),
    }
    return {**about, "survey": figures, **words}


def write(report: dict[str, Any], survey: Survey, folder: str | Path) -> list[Path]:
    """Write report.json into ``folder``, and report.md and report.html from the templates beside
    this file."""
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    from . import plots

    loader, escaped = FileSystemLoader(Path(__file__).parent), select_autoescape(["html.j2"])
    environment = Environment(
        loader=loader, autoescape=escaped, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["markdown"] = markdown
    headings = columns(survey.drift[BASELINE])
    known = dict(survey=survey, headings=headings, row_text=row_text, names=CONTENDERS, plots=plots)
    files = [Path(folder) / name for name in FILES]
    write_json(files[0], report)
    for file in files[1:]:
        write_text(file, environment.get_template(f"{file.name}.j2").render(**report | known))
    return files
