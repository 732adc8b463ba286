"""Run any test suite with timm patched: ``pytest -p timm_naflex_fast.pytest_plugin --naflex-mode matmul``.

``--naflex-leaks`` fails each test after which timm is patched otherwise than before it; so does the fixture
``naflex_leaks`` for the tests that ask for it. ``--naflex-mode stock --naflex-leaks`` looks for leaks alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from .patching.install import disable, enable, snapshot, status
from .patching.settings import MODES, default_mode
from .resampling import cache

METHODS = "replaced methods"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--naflex-mode``, ``--naflex-library`` and ``--naflex-leaks``."""
    group = parser.getgroup("timm_naflex_fast")
    modes = f"timm_naflex_fast's mode: {', '.join(MODES)} (default: TIMM_NAFLEX_FAST_MODE, else matmul)"
    group.addoption("--naflex-mode", metavar="MODE", help=modes)
    libraries = "timm (default), transformers, torchtitan; repeatable"
    group.addoption("--naflex-library", metavar="NAME", action="append", help=libraries)
    leaks = "fail each test that leaves the library patched otherwise"
    group.addoption("--naflex-leaks", action="store_true", help=leaks)


def pytest_configure(config: pytest.Config) -> None:
    """Patch the library until the run ends."""
    libraries = config.getoption("naflex_library")
    try:
        handle = enable(config.getoption("naflex_mode") or default_mode(), library=tuple(libraries or ["timm"]))
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(f"timm_naflex_fast: {error}") from error
    config.add_cleanup(handle.restore)


def pytest_report_header() -> list[str]:
    """Say what the tests run with."""
    return str(status()).splitlines()


@pytest.fixture
def naflex_leaks() -> None:
    """Fail the test if it leaves timm patched otherwise than before, or unpatched with tables in the cache."""


@pytest.fixture(autouse=True)
def _look_for_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    # pytest sets up this fixture before every other one of a single test, so it is torn down after them.
    wanted = request.config.getoption("naflex_leaks") or "naflex_leaks" in request.fixturenames
    with no_leaks() if wanted else nullcontext():
        yield


@contextmanager
def no_leaks() -> Iterator[None]:
    """Call ``pytest.fail`` if the block leaves a patch or kept tables, after putting back what was there before."""
    put_back, before, kept = snapshot(), _patches(), _tables()
    yield
    if _patches() != before:
        gc.collect()  # a model's settings end with the model
    after = _patches()
    leaks: list[str] = []
    for what, then in before.items():
        now = after[what]
        if now != then and not (leaks and what == METHODS):  # those follow from the settings
            leaks.append(f"{what}: {_only(now, then)}, before: {_only(then, now)}")
    if not after[METHODS] and _tables() > kept:
        leaks.append(f"{_tables() - kept} resized tables in the cache; timm_naflex_fast.disable() drops them")
    if leaks:
        disable()  # kept tables too
        put_back()
        pytest.fail(f"the test left {'; '.join(leaks)}", pytrace=False)


def _only(one: Any, other: Any) -> Any:
    """The entries of a dictionary that differ from the other's; anything else as it is."""
    return {key: value for key, value in one.items() if other.get(key) != value} if isinstance(one, dict) else one


def _patches() -> dict[str, Any]:
    now = status()
    return {
        "the settings for every model": now.flags,
        "the settings of models": sorted(map(str, now.models)),
        METHODS: now.replaced,
    }


def _tables() -> int:
    return cache.stats()[0].get("resized tables and kernels", 0)
