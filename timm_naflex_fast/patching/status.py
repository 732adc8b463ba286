"""What ``status()`` gives, and how it prints."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..text_table import table
from .choices import CHOICES_ATTRIBUTE, STOCK, VALID_MODES, Choice, Settings, holding, lock
from .counts import call_counts
from .decide import settings_for
from .install import imported_libraries, known_libraries, modules_of, take_off_unneeded
from .library import Library, has, hidden, hiding, with_derived
from .not_served import not_served
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


def status(model: nn.Module | None = None) -> Status:
    """What is replaced by what at present, for every model or for one, and what has run since.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> status().calls
    {}
    """
    libraries = imported_libraries()
    modules: list[Any] = []
    scope = "every model"
    if model is not None:
        modules, libraries = modules_of(model)
        scope = f"this {type(model).__name__}"
    with lock:
        take_off_unneeded()
        choices = _holding_for_models() if model is None else []
        patched = [each.name for each in known_libraries.values() if each.in_place]
        flags = STOCK
        replaced: dict[str, str] = {}
        notes: list[str] = []
        for library in libraries:
            users = _users(library, modules)
            # The innermost: a part may have settings of its own.
            settings = settings_for(users[-1], library)
            # A choice for both libraries is the same for both; else the first that was chosen is
            # shown.
            if flags == STOCK:
                flags = settings
            replaced |= _who_computes(library, users, settings)
            notes += _notes(library, users, patched)
        if patched:
            # Without a model, the classes are looked at that patched libraries have loaded.
            asked = [each for each in libraries if model is not None or each.in_place]
            notes += not_served(asked, model)
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
            scope=scope,
            patched=tuple(patched),
        )


def _users(library: Library, modules: list[Any]) -> list[Any]:
    """Of a model, its modules that have methods of the library's; else all such classes."""
    users: dict[Any, bool] = {}  # in order
    for owner in library.owners().values():
        for each in modules or with_derived(owner):
            if has(each, owner):
                users[each] = True
    # A part of a model comes after what it is in.
    in_order = [each for each in modules if each in users] or list(users)
    return in_order or [None]


def _who_computes(library: Library, users: list[Any], settings: Settings) -> dict[str, str]:
    """The strategy, or "stock", of each method of which ours is called for one of the users."""
    strategies = {}
    for key, owner in library.owners().items():
        # What another package has put over ours may call it; the library's own does not.
        is_there = key in library.in_place and not library.wrote(vars(owner).get(key[1]))
        called = [hiding(user, key[1], owner) is None for user in users if has(user, owner)]
        if is_there and any(called):
            replacement = library.replacements[key]
            mode = getattr(settings, replacement.component)
            strategies[f"{owner.__name__}.{key[1]}"] = replacement.strategies.get(mode, "stock")
    return strategies


def _notes(library: Library, users: list[Any], patched: list[str]) -> list[str]:
    """What a user may not expect of a library, in sentences."""
    notes = []
    if library.in_place:
        notes += hidden(library, users)
    for before, note in library.notes.items():
        if version_of(library) < before:
            notes.append(note)
    if patched and not library.in_place and library.owners():
        notes.append(f"{library.name} is not patched: {HOW_TO_PATCH}")
    return notes


def _holding_for_models() -> list[Choice]:
    """The choices that hold now for models of their own, oldest first."""
    found = []
    for choice in holding():
        for reference in choice.places:
            place = reference()
            newest = vars(place).get(CHOICES_ATTRIBUTE, ())[-1:] if place is not None else ()
            if choice.model_class and choice in newest:
                found.append(choice)
                break
    return found
