"""Which code really ran in a test: ``@pytest.mark.ran`` fails a test whose claim about a mode nothing backs.

``seen`` counts like ``status().calls``, but ``enable`` and ``disable`` do not reset it. ``force_stock`` makes the
dispatcher answer "stock" to everything: every test that claims something about a mode must then fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from timm_naflex_fast.backends import choose
from timm_naflex_fast.patching import library

seen: Counter[tuple[str, str]] = Counter()
overruled: Counter[str] = Counter()  # by what was chosen; filled after ``force_stock``
OURS = ("matmul", "interpolate_cached", "grid_sample")


class Calls(Counter):
    """``choose.calls``, which also counts into ``seen``."""

    def __setitem__(self, key, value):
        if value > self.get(key, 0):
            seen[key] += 1
        super().__setitem__(key, value)


def claims(item: pytest.Item) -> list[tuple[str, str]]:
    """What a test says ran: ``ran("matmul", "rope=batched")``; without names, its parameter's mode, else "matmul"."""
    mark = item.get_closest_marker("ran")
    if mark is None:
        return []
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    modes = [parameters[name] for name in ("mode", "strategy", "contender", "name") if name in parameters]
    names = mark.args or [mode for mode in modes if mode in OURS] or ([] if modes else ["matmul"])
    return [tuple(name.split("=")) if "=" in name else ("pos_embed", name) for name in names]


@contextmanager
def ran(*steps: tuple[str, str]) -> Iterator[None]:
    """Fail unless each (step, who) is counted inside."""
    before = seen.copy()
    yield
    missing = [f"{step} by {who}" for step, who in steps if seen[step, who] <= before[step, who]]
    assert not missing, f"{', '.join(missing)} never ran; what ran: {dict(seen - before)}"


def watch() -> None:
    """Count into ``seen`` from now on."""
    choose.calls = Calls(choose.calls)


def force_stock() -> None:
    """Let the dispatcher hand every call to the library's own code, as a plugin that does nothing would."""
    decide = library.decide

    def stock(*arguments: Any, **named: Any) -> tuple[str, str | None]:
        overruled[decide(*arguments, **named)[0]] += 1
        return "stock", None

    library.decide = stock
