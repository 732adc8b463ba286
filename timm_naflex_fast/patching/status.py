"""What ``status()`` gives, and how it prints."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..text_table import table
from . import graphs
from .choices import CHOICES_ATTRIBUTE, STOCK, VALID_MODES, Settings, holding, lock
from .counts import call_counts
from .decide import settings_for
from .install import imported_libraries, known_libraries, modules_of, take_off_unneeded
from .library import Library, has, hidden, hiding
from .not_served import loaded_classes, not_served
from .releases import version_of

HOW_TO_PATCH = 'enable() patches timm, enable(library="transformers") patches transformers'
SHARED_GRAPHS = (
    "a graph was compiled with a filter of guards: it may serve other models of the same class in "
    "the mode of the first, so choose one mode for all of them"
)


@dataclass(frozen=True, repr=False)
class Status:
    """What is replaced by what. Prints as a table, in a notebook too.

    ``flags`` are the settings for every model (or of the one asked about), ``models`` those of
    models that have their own. ``replaced`` maps the libraries' methods to what computes them
    (empty when nothing is replaced). Since the last ``enable()``: ``calls`` counts what computed
    which component, ``fallbacks`` why a library's own code ran although something else was chosen.
    Under ``torch.compile`` each trace counts, and the calls of a finished graph do not. ``notes``
    are sentences on what a user may not expect. ``patched`` names the libraries of which anything
    is replaced in this process.
    """

    flags: Settings
    models: tuple[Settings, ...]
    replaced: dict[str, str]
    timm: str
    torch: str
    calls: dict[tuple[str, str], int]
    fallbacks: dict[str, int]
    notes: tuple[str, ...]
    scope: str
    patched: tuple[str, ...]

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
            for settings in self.models:
                lines.append(f"one model has its own: {in_words(settings)}")
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


def status(model: nn.Module | None = None) -> Status:
    """What is replaced by what at present, for every model or for one, and what has run since.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> status().calls
    {}
    """
    scope = "every model"
    modules: dict[Library, list[nn.Module]] = {library: [] for library in imported_libraries()}
    if model is not None:
        scope = f"this {type(model).__name__}"
        modules = modules_of(model)
    with lock:
        take_off_unneeded()
        patched = [each.name for each in known_libraries.values() if each.in_place]
        flags = STOCK
        replaced: dict[str, str] = {}
        notes: list[str] = []
        for library, users in modules.items():
            # The innermost: a part may have settings of its own.
            settings = settings_for(users[-1] if users else None, library)
            # A choice for both libraries is the same for both; else the first that was chosen is
            # shown.
            if flags == STOCK:
                flags = settings
            replaced |= _who_computes(library, users, settings)
            notes += _notes(library, users, patched)
        # timm imports all of its models at once, used or not: they say nothing.
        classes: Iterable[type] = loaded_classes() if "transformers" in patched else ()
        if model is not None:
            classes = map(type, model.modules())
        if patched:
            notes += not_served(modules, classes)
        if graphs.is_unguarded() and _settings_of_models():
            notes.append(SHARED_GRAPHS)
        return Status(
            flags=flags,
            models=tuple(_settings_of_models()) if model is None else (),
            replaced=replaced,
            timm=getattr(sys.modules.get("timm"), "__version__", "(not imported)"),
            torch=torch.__version__,
            calls=dict(call_counts.calls),
            fallbacks=dict(call_counts.fallbacks),
            notes=tuple(notes),
            scope=scope,
            patched=tuple(patched),
        )


def _who_computes(library: Library, modules: list[nn.Module], settings: Settings) -> dict[str, str]:
    """The strategy, or "stock", of each method of which ours is called: in one of these modules or,
    without them, in any."""
    strategies = {}
    for key, owner in library.owners().items():
        # What another package has put over ours may call it; the library's own does not.
        is_there = key in library.in_place and not library.wrote(vars(owner).get(key[1]))
        users = [each for each in modules if has(each, owner)]
        called = [hiding(each, key[1], owner) is None for each in users]
        if is_there and (any(called) or not modules):
            replacement = library.replacements[key]
            mode = getattr(settings, replacement.component)
            strategies[f"{owner.__name__}.{key[1]}"] = replacement.strategies.get(mode, "stock")
    return strategies


def _notes(library: Library, modules: list[nn.Module], patched: list[str]) -> list[str]:
    """What a user may not expect of a library, in sentences."""
    notes = []
    if library.in_place:
        notes += hidden(library, modules)
    for before, note in library.notes.items():
        if version_of(library) < before:
            notes.append(note)
    if patched and not library.in_place and library.owners():
        notes.append(f"{library.name} is not patched: {HOW_TO_PATCH}")
    return notes


def _settings_of_models() -> list[Settings]:
    """What holds now for models that have their own, oldest first."""
    found = []
    for choice in holding():
        for place in list(choice.places):
            newest = vars(place).get(CHOICES_ATTRIBUTE, ())[-1:]
            if isinstance(place, nn.Module) and choice in newest:
                found.append(choice.settings)
                break
    return found
