"""What ``status()`` gives, and how it prints."""

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..text_table import table
from .choices import STOCK, VALID_MODES, Choice, Settings
from .decide import call_counts, settings_for
from .library import Library, owner_of, targets
from .others import classes_of, in_force, modules_in, not_served
from .releases import version_of

HOW_TO_PATCH = 'enable() patches timm, enable(library="transformers") patches transformers'


@dataclass(frozen=True, repr=False)
class Status:
    """What is replaced by what. Prints as a table, in a notebook too.

    ``flags`` are the settings for every model (or of the one asked about), ``models`` those of
    models that have their own, ``model_classes`` the classes of these. ``replaced`` maps the
    libraries' methods to what computes them (empty when nothing is replaced). Since the last
    ``enable()``: ``calls`` counts what computed which component, ``fallbacks`` why a library's own
    code ran although something else was chosen. Under ``torch.compile`` each trace counts, and the
    calls of a finished graph do not. ``notes`` are sentences on what a user may not expect.
    ``patched`` names the libraries of which anything is replaced in this process.
    """

    flags: Settings
    models: tuple[Settings, ...]
    replaced: dict[str, str]
    timm: str
    torch: str
    calls: dict[tuple[str, str], int]
    fallbacks: dict[str, int]
    model_classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scope: str = "every model"
    patched: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        if not self.patched:
            nothing = "nothing is patched in this process (every model is stock)"
            lines.append(f"{nothing}: {HOW_TO_PATCH}")
        elif not self.replaced:
            names = " and ".join(self.patched)
            lines.append(f"nothing is replaced in {self.scope} (patched in this process: {names})")
        else:
            by = f"by, in {self.scope}"
            lines.append(table([{"replaced": key, by: who} for key, who in self.replaced.items()]))
            for name, settings in zip(self.model_classes, self.models):
                lines.append(f"one {name} has its own: {in_words(settings)}")
            lines += ["", self._what_ran(), *self.why_stock()]
        return "\n".join([*lines, *self.notes])

    def _what_ran(self) -> str:
        """The counts, as a table."""
        heading = "what ran since enable()"
        if not self.calls:
            return table([{heading: "(nothing yet)", "calls": "0"}])
        rows = []
        for (component, strategy), n in sorted(self.calls.items()):
            rows.append({heading: f"{component}: {strategy}", "calls": str(n)})
        return table(rows)

    def why_stock(self) -> list[str]:
        """Why the library's own code ran in place of what was chosen, in sentences."""
        sentences = []
        for why, n in self.fallbacks.items():
            times = "1 time" if n == 1 else f"{n} times"
            sentences.append(f"the library's own code ran {times}: {why}")
        return sentences


def in_words(settings: Settings) -> str:
    """Settings as a sentence has them."""
    if settings == STOCK:
        return "the library's own code"
    words = [f"{component} by {getattr(settings, component)}" for component in VALID_MODES]
    if settings.strict:
        words.append("strict")
    return ", ".join(words)


def describe(
    libraries: Iterable[Library],
    patched: Collection[str],
    model: nn.Module | None,
    choices: Collection[Choice],
    modules: Collection[nn.Module],
) -> Status:
    """What holds now, for one model or for every model.

    Args:
        libraries: those that the model is of, or all that are imported.
        patched: the names of those of which anything is replaced in this process.
        model: None: every model.
        choices: what holds for models with their own.
        modules: of any model, which may have a method of their own in place of ours.
    """
    flags = STOCK
    replaced: dict[str, str] = {}
    notes: list[str] = []
    for library in libraries:
        users: list[Any] = [*classes_of(library), *modules]
        module = None
        if model is not None:
            users = modules_in(library, model)
            # The innermost: a part may have settings of its own.
            module = users[-1]
        settings = settings_for(module, library)
        # A choice for both libraries is the same for both; else the first that was chosen is shown.
        if flags == STOCK:
            flags = settings
        keys, sentences = in_force(library, users)
        for key, replacement in library.replacements.items():
            if key in keys:
                path, name = key
                mode = getattr(settings, replacement.component)
                strategy = replacement.strategies.get(mode, "stock")
                replaced[f"{owner_of(path).__name__}.{name}"] = strategy
        notes += sentences
        for before, note in library.notes.items():
            if version_of(library) < before:
                notes.append(note)
        if library.name in patched:
            notes += not_served(library, model)
        elif patched and any(targets(library)):
            notes.append(f"{library.name} is not patched: {HOW_TO_PATCH}")
    return Status(
        flags=flags,
        models=tuple(choice.settings for choice in choices),
        replaced=replaced,
        timm=getattr(sys.modules.get("timm"), "__version__", "(not imported)"),
        torch=torch.__version__,
        calls=dict(call_counts.calls),
        fallbacks=dict(call_counts.fallbacks),
        model_classes=tuple(choice.model_class for choice in choices),
        notes=tuple(notes),
        scope="every model" if model is None else f"this {type(model).__name__}",
        patched=tuple(patched),
    )
