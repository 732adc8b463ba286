"""Which code really ran in a test: ``@pytest.mark.ran`` fails a test whose claim about a mode nothing backs.

``seen`` counts like ``status().calls``, but ``enable`` and ``disable`` do not reset it. ``children`` adds what ran in
child processes. ``force_stock`` makes the dispatcher answer "stock" to everything: every test that claims something
about a mode must then fail.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from timm_naflex_fast.measure.output import provenance

seen: Counter[tuple[str, str]] = Counter()
overruled: Counter[str] = Counter()  # by what was chosen; filled after ``force_stock``
OURS = ("matmul", "interpolate_cached", "grid_sample")
FORCED = os.environ.get("NAFLEX_TESTS_FORCE_STOCK")  # the file into which the outcome is written
FOLDER = "NAFLEX_TESTS_CHILDREN"  # the environment variable that tells a child where to write


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


def write_outcome(red: list[str], green: list[str]) -> None:
    """Write what a run with timm's own code in place of ours found."""
    record = {
        **provenance("uv run pytest"),
        "ask for ours": len(red) + len(green),
        "red": len(red),
        "green": sorted(green),
    }
    assert FORCED is not None
    Path(FORCED).parent.mkdir(parents=True, exist_ok=True)
    Path(FORCED).write_text(json.dumps(record, indent=1) + "\n")


def watch() -> None:
    """Count into ``seen`` from now on."""
    # Imported here: where this module is imported in a child, that import calls ``watch_a_child``.
    from timm_naflex_fast.patching import library

    record = library.record_call

    @torch.compiler.assume_constant_result  # as the function that it wraps
    def count_and_record(name: str, component: str, impl: str, reason: str | None = None) -> None:
        seen[component, impl] += 1
        record(name, component, impl, reason)

    library.record_call = count_and_record


@contextmanager
def children(folder: Path) -> Iterator[Callable[[], list[Counter[tuple[str, str]]]]]:
    """Processes that start inside write into ``folder`` what ran in them.

    What it gives counts that into ``seen`` and returns it, one Counter for each process that ended by itself and
    enabled this package. ``multiprocessing`` ends its processes otherwise: they have to send ``status().calls``.
    """
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER)}
    path = [str(Path(__file__).with_name("child")), before["PYTHONPATH"]]
    os.environ.update({"PYTHONPATH": os.pathsep.join(filter(None, path)), FOLDER: str(folder)})

    def ran_there() -> list[Counter[tuple[str, str]]]:
        found = [Counter(dict((tuple(key), n) for key, n in json.loads(f.read_text()))) for f in folder.iterdir()]
        for counter in found:
            seen.update(counter)
        return found

    try:
        yield ran_there
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def watch_a_child() -> None:
    """Write down at the end of this process what ran in it."""
    watch()
    if FORCED:
        force_stock()

    def write() -> None:
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps([*seen.items()]))

    atexit.register(write)


def force_stock() -> None:
    """Let the dispatcher hand every call to the library's own code, as a plugin that does nothing would."""
    from timm_naflex_fast.patching import library

    resolve = library.resolve

    def stock(*arguments: Any) -> tuple[str, None]:
        overruled[resolve(*arguments)[0]] += 1
        return "stock", None

    library.resolve = stock
