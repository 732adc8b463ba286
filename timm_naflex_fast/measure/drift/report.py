"""What a report holds, the sentences and tables that follow from it, and its files.

Every file is made from a :class:`Report` alone, so report.json can be rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..contenders import BASELINE, CONTENDERS, OURS
from .pictures import Picture
from .survey import Drift, GridDrift, Survey


@dataclass(frozen=True)
class Report:
    """A survey, and what it was made of and with.

    Attributes:
        weights: which weights the model held, in words.
        stand_in: the weights are not trained ones, so the figures say nothing about a trained model.
        source: where the images came from.
        skipped: the images that could not be read, each with the reason.
        resampling: the model's own setting, e.g. "bicubic, antialias".
        made: command, date, machine and versions.
    """

    model: str
    weights: str
    stand_in: bool
    source: str
    skipped: list[str]
    dtype: str
    patch_size: int
    max_seq_len: int
    resampling: str
    survey: Survey
    made: dict[str, Any]


def settings(embeds: Any) -> str:
    """How a NaFlexEmbeds resamples by itself, in words, e.g. "bicubic, antialias"."""
    if embeds.pos_embed_type != "learned":
        return "linear" if embeds.pos_embed_type == "factorized" else "no position table"
    how = {
        "grid_sample": embeds.pos_embed_use_grid_sample,
        "antialias": getattr(embeds, "pos_embed_antialias", True) and not embeds.pos_embed_use_grid_sample,
        "align_corners": getattr(embeds, "pos_embed_align_corners", False),
        "aspect preserving": embeds.pos_embed_ar_preserving,
    }
    return ", ".join([embeds.pos_embed_interp_mode, *(word for word, on in how.items() if on)])


# Sentences


def headline(survey: Survey) -> str:
    """The answer in one line: to which of this package's strategies one may switch, `matmul` first."""
    ours = sorted((name for name in OURS if name in survey.drift), key="matmul".__ne__)
    answers = "; ".join(f"`{name}`: {'yes' if survey.exact(name) else 'no'}" for name in ours)
    return f"Safe to switch to {answers}" if ours else "No strategy of this package was measured"


def verdict(survey: Survey, stand_in: bool = False) -> str:
    """The figures behind the answer, in one sentence; ``stand_in`` adds that trained weights may differ."""
    ours = [name for name in OURS if name in survey.drift]
    parts = []
    exact = [name for name in ours if survey.exact(name)]
    if exact:
        worst = max(survey.drift[name].embed_max_abs for name in exact)
        how = f"but for rounding (embeddings within {worst:.1e})" if worst else "bit for bit"
        parts.append(f"{_and(exact)} {'give' if len(exact) > 1 else 'gives'} timm's own result {how}")
    parts += [f"{name} moves {_moved(survey, name)}" for name in ours if name not in exact]
    rest = [name for name in survey.drift if name not in (BASELINE, *OURS)]
    moving = sorted((survey.drift[name].embed_rel_rms, name) for name in rest if not survey.exact(name))
    if moving:
        (low, least), (high, most) = moving[0], moving[-1]
        span = f"by {percent(low)} ({least})" + (f" to {percent(high)} ({most})" if len(moving) > 1 else "")
        parts.append(f"{len(moving)} of {len(rest)} other contenders move them {span}")
    sentence = f"On {survey.images:,} image{'s' * (survey.images != 1)}, {'; '.join(parts) or 'nothing was compared'}"
    return sentence + ("; with stand-in weights, a trained model may differ." if stand_in else ".")


def _moved(survey: Survey, name: str) -> str:
    own, timms = survey.drift[name], survey.drift[BASELINE]
    words = [f"the embeddings by {percent(own.embed_rel_rms)} (RMS)"]
    words.append(f"gives {percent(1 - own.neighbours)} of the images another nearest neighbour")
    if own.accuracy is not None and timms.accuracy is not None:
        words.append(f"takes accuracy from {percent(timms.accuracy)} to {percent(own.accuracy)}")
    return _and(words)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + list(words[-1:]))


def percent(value: float) -> str:
    """A share as text: "11.87 %"; "0 %" is exactly nothing, "< 0.01 %" nearly nothing."""
    return "0 %" if not value else "< 0.01 %" if 0 < value < 5e-5 else f"{100 * value:.2f} %"


# Tables


def columns(survey: Survey) -> dict[str, str]:
    """Headings of the table of contenders, by the field of :class:`Drift`; a model without classes has no such ones."""
    headings = {
        "embed_max_abs": "embedding, max abs",
        "embed_rel_rms": "embedding, relative RMS",
        "pooled_cosine_distance": "pooled output, cosine distance",
        "neighbours": "same nearest image",
        "agreement": "same class",
        "accuracy": "accuracy",
    }
    timms = survey.drift[BASELINE]
    return {key: heading for key, heading in headings.items() if getattr(timms, key) is not None}


def cells(survey: Survey, name: str) -> list[str]:
    """A contender's figures under :func:`columns`, the same text in every table."""
    found = {key: getattr(survey.drift[name], key) for key in columns(survey)}
    numbers = ("embed_max_abs", "pooled_cosine_distance")
    return [(f"{v:.2g}" if v else "0") if key in numbers else percent(v) for key, v in found.items()]


def words(report: Report, name: str) -> str:
    """What a contender is; for timm's own loop with the model's own setting."""
    return CONTENDERS[name] + (f", {report.resampling}" if name == BASELINE else "")


def facts(report: Report) -> dict[str, str]:
    """What was measured and with what."""
    made = report.made
    return {
        "Weights": report.weights,
        "Images": f"{report.survey.images:,} ({report.source})",
        "Sequence length": f"{report.max_seq_len} patches at most",
        "Patches": f"{report.patch_size}x{report.patch_size} pixels",
        "The model's own resampling": report.resampling,
        "Number type": report.dtype,
        "Rounding": f"embeddings no farther apart than {report.survey.tolerance:.1e}",
        "Made with": f"torch {made['torch']}, timm {made['timm']}, {made['machine']}",
        "Made on": made["date"],
        "Command": made["command"],
    }


# Files

FILES = ("report.json", "report.md", "report.html")


def record(report: Report) -> dict[str, Any]:
    """Everything in the report, and what follows from it in words."""
    return {**asdict(report), "headline": headline(report.survey), "verdict": verdict(report.survey, report.stand_in)}


def write(report: Report, folder: str | Path) -> list[Path]:
    """Write the report in every form into ``folder``, which is made; returns the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in FILES]
    for file, content in zip(
        files, (json.dumps(record(report)) + "\n", render(report, "report.md"), render(report, "report.html"))
    ):
        file.write_text(content, encoding="utf-8")
    return files


def read(path: str | Path) -> Report:
    """The report in a report.json.

    Raises:
        ValueError: it is no such file.
    """
    try:
        kept = json.loads(Path(path).read_text(encoding="utf-8"))
        found = kept["survey"]
        found["drift"] = {name: Drift(**drift) for name, drift in found["drift"].items()}
        found["grids"] = [GridDrift(**{**grid, "grid": tuple(grid["grid"])}) for grid in found["grids"]]
        found["pictures"] = [Picture(**{**one, "grid": tuple(one["grid"])}) for one in found["pictures"]]
        derived = ("survey", "headline", "verdict")
        return Report(survey=Survey(**found), **{key: value for key, value in kept.items() if key not in derived})
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of naflex-fast drift: {error!r}") from error


def render(report: Report, name: str) -> str:
    """The text of report.md or report.html, from the template of that name beside this file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from . import plots

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    helpers = dict(words=words, cells=cells, columns=columns, facts=facts, percent=percent, plots=plots)
    sentences = dict(headline=headline(report.survey), verdict=verdict(report.survey, report.stand_in))
    return environment.get_template(f"{name}.j2").render(report=report, survey=report.survey, **helpers, **sentences)
