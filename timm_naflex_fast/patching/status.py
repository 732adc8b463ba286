"""What ``status()`` gives, and how it prints."""

import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from ..text_table import table
from .choices import SETTINGS_ATTRIBUTE, STOCK, Override, Settings
from .library import Library, author_of, call_counts, targets
from .releases import foreign_methods, look_up, users_of, version_of


@dataclass(frozen=True)
class Status:
    """What is replaced by what. Prints as a table.

    ``flags`` are the settings for every model (or of the one asked about), ``models`` those of
    models that have their own, ``model_classes`` the classes of these. ``replaced`` maps the
    libraries' methods to what computes them (empty when nothing is replaced). Since the last
    ``enable()``: ``calls`` counts what computed which component, ``fallbacks`` why a library's own
    code ran although something else was chosen. Under ``torch.compile`` each trace counts, and the
    calls of a finished graph do not. ``notes`` are sentences on what a user may not expect.
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

    def __str__(self) -> str:
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        if not self.replaced:
            nothing = "nothing is patched in this process; enable() or naflex-fast run does it (every model is stock)"
            return "\n".join([*lines, nothing, *self.notes])
        lines.append(
            table(
                [
                    {"replaced": what, f"by, in {self.scope}": who}
                    for what, who in self.replaced.items()
                ]
            )
        )
        lines += [
            f"one {name} has its own: {settings}"
            for name, settings in zip(self.model_classes, self.models)
        ]
        counted = {": ".join(key): str(n) for key, n in sorted(self.calls.items())} or {
            "(nothing yet)": "0"
        }
        lines += [
            "",
            table([{"what ran since enable()": what, "calls": n} for what, n in counted.items()]),
        ]
        return "\n".join([*lines, *self.why_stock(), *self.notes])

    def why_stock(self) -> list[str]:
        """One sentence for each reason why a library's own code ran although something else was
        chosen."""
        return [
            f"the library's own code ran {n} time{'s' * (n != 1)}: {why}"
            for why, n in self.fallbacks.items()
        ]


def describe(
    libraries: Collection[Library],
    modules: Collection[nn.Module],
    models: Collection[Override],
    scope: str,
) -> Status:
    """What holds now, for these modules of one model or, without any, for every model. ``models``:
    what others have."""
    replaced: dict[str, str] = {}
    notes: list[str] = []
    of_modules = [getattr(module, SETTINGS_ATTRIBUTE, None) for module in modules]
    own = next(
        (one.settings for one in of_modules if one is not None and one.settings is not None), None
    )
    for library in libraries:
        for owner, name, key in targets(library):
            if any(
                author_of(look_up(user, name)[1], library) == "ours"
                for user in users_of(owner, modules)
            ):
                replacement = library.replacements[key]
                mode = getattr(own or library.settings, replacement.component)
                replaced[f"{owner.__name__}.{name}"] = replacement.strategies.get(mode, "stock")
        notes += foreign_methods(library, modules)
        notes += [note for before, note in library.notes.items() if version_of(library) < before]
    settings = own or next(
        (library.settings for library in libraries if library.settings != STOCK), STOCK
    )
    timm = getattr(sys.modules.get("timm"), "__version__", "(not imported)")
    counted = dict(call_counts.calls), dict(call_counts.fallbacks)
    settings_of_models, names = tuple(o.settings for o in models), tuple(o.model for o in models)
    return Status(
        settings,
        settings_of_models,
        replaced,
        timm,
        torch.__version__,
        *counted,
        names,
        tuple(notes),
        scope,
    )
