"""What a report holds, and the sentences that follow from it. Every rendering reads this and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...patching.modes import POS_EMBED
from .maps import Picture
from .measure import Drift, GridDrift, Survey


@dataclass(frozen=True)
class Report:
    """A survey, and what it was made of and with.

    Attributes:
        weights: which weights the model held, in words.
        stand_in: the weights are not trained ones, so the figures say nothing about a trained model.
        source: where the images came from.
        skipped: the images that could not be read, each with the reason.
        resampling: the model's own setting, e.g. "bicubic, antialias".
        made: command, date, commit, machine and versions.
    """

    model: str
    weights: str
    stand_in: bool
    source: str
    skipped: list[str]
    dtype: str
    patch_size: int
    max_seq_len: list[int]
    resampling: str
    survey: Survey
    made: dict[str, Any]

    @property
    def verdict(self) -> str:
        """What was found, in one sentence."""
        return verdict(self.survey, self.stand_in)


def write_json(path: str | Path, report: Report) -> None:
    """Write the report as one object; rows of numbers stay on one line."""
    text = json.dumps({**asdict(report), "verdict": report.verdict}, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Report:
    """The report that :func:`write_json` wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        record.pop("verdict")
        found = record.pop("survey")
        found["drift"] = {name: Drift(**drift) for name, drift in found["drift"].items()}
        found["grids"] = [GridDrift(**{**grid, "grid": tuple(grid["grid"])}) for grid in found["grids"]]
        found["pictures"] = [Picture(**{**one, "grid": tuple(one["grid"])}) for one in found["pictures"]]
        return Report(survey=Survey(**found), **record)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of naflex-fast drift: {error!r}") from error


def groups(survey: Survey) -> list[list[str]]:
    """The contenders, those together whose drift is the same to 1 % in every block and grid; exact ones first."""
    exact = [name for name in survey.drift if survey.exact(name)]
    found = [exact]
    for name in survey.drift:
        if name not in exact:
            for group in found[1:]:
                if _alike(_curve(survey, name), _curve(survey, group[0])):
                    group.append(name)
                    break
            else:
                found.append([name])
    return found


def _curve(survey: Survey, name: str) -> list[float]:
    return [*survey.blocks[name], *(grid.embed_rel_rms[name] for grid in survey.grids)]


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(p - q) <= 1e-2 * max(abs(p), abs(q)) + 1e-6 for p, q in zip(a, b))


def verdict(survey: Survey, stand_in: bool = False) -> str:
    """What was found, in one sentence; ``stand_in`` adds that trained weights may differ."""
    others = [name for name in survey.drift if name != survey.baseline]
    ours = [name for name in others if name in POS_EMBED]
    peers = [name for name in others if name not in POS_EMBED]
    same = "timm's own result" if survey.baseline == "stock" else f"the result of {survey.baseline}"
    parts = []
    exact = [name for name in ours if survey.exact(name)]
    if exact:
        worst = max(survey.drift[name].embed_max_abs for name in exact)
        how = f"but for rounding (embeddings within {worst:.1e})" if worst else "bit for bit"
        parts.append(f"{_and(exact)} {'give' if len(exact) > 1 else 'gives'} {same} {how}")
    parts += [f"{name} moves {_moved(survey, name)}" for name in ours if name not in exact]
    moving = sorted((survey.drift[name].embed_rel_rms, name) for name in peers if not survey.exact(name))
    if moving:
        (low, least), (high, most) = moving[0], moving[-1]
        span = f"by {percent(low)} ({least})" + (f" to {percent(high)} ({most})" if len(moving) > 1 else "")
        some = f"{len(moving)} of the" if len(moving) < len(peers) else "all" if len(peers) > 1 else "the"
        ways = f"{some} {len(peers)} other way{'s' * (len(peers) > 1)} measured"
        parts.append(f"{ways} {'move' if len(moving) > 1 else 'moves'} them {span}")
    elif peers:
        parts.append(f"none of the {len(peers)} other ways measured moves them")
    sentence = f"On {survey.images:,} image{'s' * (survey.images != 1)}, {'; '.join(parts) or 'nothing was compared'}"
    return sentence + ("; with stand-in weights, a trained model may differ." if stand_in else ".")


def _moved(survey: Survey, name: str) -> str:
    own, stock = survey.drift[name], survey.drift[survey.baseline]
    words = [f"the embeddings by {percent(own.embed_rel_rms)} (RMS)"]
    words.append(f"gives {percent(1 - own.neighbours)} of the images another nearest neighbour")
    if own.accuracy is not None and stock.accuracy is not None:
        words.append(f"takes accuracy from {percent(stock.accuracy, 2)} to {percent(own.accuracy, 2)}")
    return _and(words)


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + list(words[-1:]))


def percent(value: float, digits: int = 1) -> str:
    """A share as text: "11.9 %", and where that would round to nothing "3.1e-05 %"."""
    if value and abs(value) < 0.5 * 10 ** -(digits + 2):
        return f"{100 * value:.1e} %"
    return f"{100 * value:.{digits}f} %"


COLUMNS = (
    "contender",
    "what it is",
    "embedding, max abs",
    "embedding, relative RMS",
    "pooled output, cosine distance",
    "same nearest neighbour",
    "same class",
    "accuracy",
)


def cells(report: Report, name: str) -> tuple[str, ...]:
    """A contender's row under ``COLUMNS``, as text."""
    from .peers import WORDS

    drift = report.survey.drift[name]
    what = WORDS[name] + (f", {report.resampling}" if name == "stock" else "")
    return (
        name + (" (baseline)" if name == report.survey.baseline else ""),
        what,
        f"{drift.embed_max_abs:.1e}" if drift.embed_max_abs else "0",
        percent(drift.embed_rel_rms, 2),
        f"{drift.pooled_cosine_distance:.1e}" if drift.pooled_cosine_distance else "0",
        percent(drift.neighbours, 2),
        "-" if drift.accuracy is None else percent(drift.agreement, 2),
        "-" if drift.accuracy is None else percent(drift.accuracy, 2),
    )


def facts(report: Report) -> list[tuple[str, str]]:
    """What was measured and with what, as (label, words)."""
    made = report.made
    found = [
        ("Weights", report.weights),
        ("Images", f"{report.survey.images:,} ({report.source})"),
        ("Sequence length", " and ".join(map(str, report.max_seq_len)) + " patches at most"),
        ("Patches", f"{report.patch_size}x{report.patch_size} pixels"),
        ("The model's own resampling", report.resampling),
        ("Number type", report.dtype),
        ("Rounding", f"embeddings no farther apart than {report.survey.tolerance:.1e}"),
        ("Made with", f"torch {made['torch']}, timm {made['timm']}, {made['machine']}"),
        ("Made on", made["date"] + (f", commit {made['commit']}" if made.get("commit") else "")),
        ("Command", made["command"]),
    ]
    return found
