"""What ``status()`` gives, and how it prints."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..text_table import table
from . import calls
from .calls import STOCK, Settings, settings_for
from .choices import VALID_MODES, holding, libraries_in_use, lock
from .install import imported_libraries, modules_of, who_computes
from .library import Library, known_libraries, owner_of, sentence_on_not_served
from .releases import installed


@dataclass(frozen=True, repr=False)
class Status:
    """What is replaced by what. Prints as a table, in a notebook too.

    ``flags`` are the settings for every model (or of the one asked about: of its innermost part),
    ``models`` those of models that have their own. ``replaced`` maps the libraries' methods to what
    computes them, another package's function too, two or more where the parts of a model differ; it
    is empty when nothing is replaced. Since the last ``enable()``: ``calls`` counts what computed which component,
    ``fallbacks`` why a library's own code ran although something else was chosen. Under
    ``torch.compile`` each trace counts, and the calls of a finished graph do not. ``notes`` are
    sentences on what a user may not expect.
    """

    flags: Settings
    models: tuple[Settings, ...]
    replaced: dict[str, str]
    timm: str
    torch: str
    calls: dict[tuple[str, str], int]
    fallbacks: dict[str, int]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        if not self.replaced:
            how = 'enable() patches timm, enable(library="transformers") patches transformers'
            return "\n".join([*lines, f"nothing is replaced: {how}", *self.notes])
        lines.append(table([{"replaced": key, "by": who} for key, who in self.replaced.items()]))
        lines += [f"one model has its own: {in_words(settings)}" for settings in self.models]
        calls = {": ".join(key): n for key, n in sorted(self.calls.items())} or {"(nothing yet)": 0}
        ran = [{"what ran since enable()": key, "calls": str(n)} for key, n in calls.items()]
        return "\n".join([*lines, "", table(ran), *self.why_stock(), *self.notes])

    def why_stock(self) -> list[str]:
        """Why the library's own code ran in place of what was chosen, in sentences."""
        return [f"the library's own code ran ({n} x): {why}" for why, n in self.fallbacks.items()]


def in_words(settings: Settings) -> str:
    """Settings as a sentence has them."""
    if settings == STOCK:
        return "the library's own code"
    words = [f"{component} by {getattr(settings, component)}" for component in VALID_MODES]
    if settings.strict:
        words.append("strict")
    return ", ".join(words)


def status(model: nn.Module | None = None) -> Status:
    """What is replaced by what at present, for every model or for one, and what has run since.

    ``enable()``, its end and ``disable()`` count anew.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> status().calls
    {}
    """
    libraries = imported_libraries()
    modules: dict[Library, list[Any]] = {library: [] for library in libraries}
    classes: list[type] = []
    if model is not None:
        modules = modules_of(model)
        classes += map(type, model.modules())
    with lock:
        in_use = libraries_in_use()
        flags = STOCK
        replaced: dict[str, str] = {}
        notes: list[str] = []
        for library, parts in modules.items():
            # The innermost: a part may have settings of its own.
            settings = settings_for(parts[-1] if parts else None, library)
            # A choice for both libraries is the same for both; else the first that was chosen is
            # shown.
            if flags == STOCK:
                flags = settings
            for version, note in library.notes.items():
                if installed(library) < version:
                    notes.append(note)
            if library in in_use:
                replaced |= who_computes(library, parts)
                if model is None:
                    classes += filter(None, map(owner_of, library.not_served))
        if in_use:
            notes += sentence_on_not_served(libraries, classes)
        own = [each.settings for each in holding() if each.places.isdisjoint(known_libraries)]
        return Status(
            flags=flags,
            models=tuple(own) if model is None else (),
            replaced=replaced,
            timm=getattr(sys.modules.get("timm"), "__version__", "(not imported)"),
            torch=torch.__version__,
            calls=dict(calls.call_counts.calls),
            fallbacks=dict(calls.call_counts.fallbacks),
            notes=tuple(notes),
        )
