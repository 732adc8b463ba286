"""What ``status()`` gives, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tables import table
from .settings import Settings

NAMES = {"pos_embed": "position embeddings", "patch_embed": "patch kernels", "rope": "rotary embeddings"}


@dataclass(frozen=True)
class Status:
    """What is replaced by what. Prints as a table.

    ``flags`` are the settings for every model (or of the one asked about), ``models`` those of models that have their
    own, ``model_classes`` the classes of these. ``replaced`` maps the libraries' methods to what computes them (empty
    when nothing is replaced), ``components`` the same by (library, component, mode). Since the last ``enable()``:
    ``calls`` counts what computed which component, ``fallbacks`` why a library's own code ran although something else
    was chosen. Under ``torch.compile`` each trace counts, and the calls of a finished graph do not. ``notes`` are
    sentences on what a user may not expect.
    """

    flags: Settings
    models: tuple[Settings, ...]
    replaced: dict[str, str]
    timm: str
    torch: str
    calls: dict[tuple[str, str], int]
    fallbacks: dict[str, int]
    model_classes: tuple[str, ...] = ()
    components: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scope: str = "every model"

    def __str__(self) -> str:
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        if not self.replaced:
            nothing = "nothing is patched in this process; enable() or naflex-fast run does it (every model is stock)"
            return "\n".join([*lines, nothing, *self.notes])
        by = {f"{key[0]}: {NAMES[key[1]]}": _by(key[2], strategies) for key, strategies in self.components.items()}
        lines.append(table([{"computed": what, f"by, in {self.scope}": strategy} for what, strategy in by.items()]))
        for name, own in zip(self.model_classes, self.models):
            lines.append(f"one {name} has its own: {', '.join(f'{k}={getattr(own, k)}' for k in NAMES)}")
        ran = {": ".join(key): str(n) for key, n in sorted(self.calls.items())} or {"(nothing yet)": "0"}
        lines += ["", table([{"what ran since enable()": what, "calls": n} for what, n in ran.items()])]
        return "\n".join([*lines, *self.why_stock(), *self.notes])

    def why_stock(self) -> list[str]:
        """One sentence for each reason why a library's own code ran although something else was chosen."""
        return [f"the library's own code ran {n} time{'s' * (n != 1)}: {why}" for why, n in self.fallbacks.items()]


def _by(mode: str, strategies: list[str]) -> str:
    """By what a component's functions are computed: the mode, and for which of timm's models by something else."""
    where = "images without coordinates" if mode == "grid_sample" else "models made with pos_embed_use_grid_sample"
    others = [f"{where}: {strategy}" for strategy in sorted(set(strategies) - {mode})]
    return f"{mode} ({', '.join(others)})" if others else mode
