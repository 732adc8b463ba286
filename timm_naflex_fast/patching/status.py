"""What ``status()`` gives, and how it prints."""

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..text_table import table
from .choices import CHOICES_ATTRIBUTE, STOCK, VALID_MODES, Choice, Settings
from .decide import call_counts
from .library import Library, targets
from .others import foreign_methods, in_force, not_served, users_in
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
            lines.append(
                f"nothing is patched in this process (every model is stock): {HOW_TO_PATCH}"
            )
            return "\n".join([*lines, *self.notes])
        if not self.replaced:
            patched = " and ".join(self.patched)
            lines.append(
                f"nothing is replaced in {self.scope} (patched in this process: {patched})"
            )
            return "\n".join([*lines, *self.notes])
        rows = [
            {"replaced": what, f"by, in {self.scope}": who} for what, who in self.replaced.items()
        ]
        lines.append(table(rows))
        for name, settings in zip(self.model_classes, self.models):
            lines.append(f"one {name} has its own: {in_words(settings)}")
        lines += ["", self._what_ran(), *self.why_stock(), *self.notes]
        return "\n".join(lines)

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
    libraries: Collection[Library],
    patched: Collection[str],
    model: nn.Module | None = None,
    modules: Collection[nn.Module] = (),
    choices: Collection[Choice] = (),
    more: Collection[nn.Module] = (),
) -> Status:
    """What holds now, for one model or for every model.

    Args:
        libraries: those that the model is of, or all that are imported.
        patched: the names of those of which anything is replaced in this process.
        model: None: every model.
        modules: of the model, those with methods that are replaced.
        choices: what holds for models with their own.
        more: modules of any model, which may have a method of their own in place of ours.
    """
    own = _own_settings(modules)
    flags = STOCK
    replaced: dict[str, str] = {}
    notes: list[str] = []
    for library in libraries:
        settings = own or library.settings
        # A choice for both libraries is the same for both; else the first that was chosen is shown.
        if flags == STOCK:
            flags = settings
        replaced.update(_replaced(library, modules, settings))
        notes += foreign_methods(library, [*users_in(library, modules), *more])
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


def _own_settings(modules: Iterable[nn.Module]) -> Settings | None:
    """Those of a model that has its own; None: those for every model hold."""
    for module in modules:
        own = getattr(module, CHOICES_ATTRIBUTE, None)
        if own is not None and own.settings is not None:
            return own.settings
    return None


def _replaced(
    library: Library, modules: Collection[nn.Module], settings: Settings
) -> dict[str, str]:
    """What computes each of the library's methods in whose place ours is."""
    replaced = {}
    for target in targets(library):
        # One that hides ours in a class of its own is named in the notes; the others run ours.
        if any(in_force(library, target, user) for user in users_in(library, modules)):
            replacement = library.replacements[target.key]
            mode = getattr(settings, replacement.component)
            label = f"{target.owner.__name__}.{target.name}"
            replaced[label] = replacement.strategies.get(mode, "stock")
    return replaced
