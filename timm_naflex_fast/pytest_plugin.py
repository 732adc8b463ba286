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

from .patching.install import disable, enable, status
from .patching.modes import MODES, default_mode
from .resampling import cache


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--naflex-mode``, ``--naflex-library`` and ``--naflex-leaks``."""
    group = parser.getgroup("timm_naflex_fast")
    help_ = f"timm_naflex_fast's mode: {', '.join(MODES)} (default: TIMM_NAFLEX_FAST_MODE, else matmul)"
    group.addoption("--naflex-mode", metavar="MODE", help=help_)
    group.addoption(
        "--naflex-library", metavar="NAME", action="append", help="timm (default), transformers; repeatable"
    )
    group.addoption(
        "--naflex-leaks", action="store_true", help="fail each test that leaves the library patched otherwise"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Patch the library until the run ends."""
    libraries = config.getoption("naflex_library")
    how: dict[str, Any] = {"library": tuple(libraries)} if libraries else {}
    try:
        handle = enable(config.getoption("naflex_mode") or default_mode(), **how)
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(f"timm_naflex_fast: {error}") from error
    config.add_cleanup(handle.restore)


def pytest_report_header() -> list[str]:
    """Say what the tests run with."""
    return str(status()).splitlines()


@pytest.fixture
def naflex_leaks() -> Iterator[None]:
    """Fail the test if it leaves timm patched otherwise than before, or unpatched with tables in the cache."""
    with no_leaks():
        yield


@pytest.fixture(autouse=True)
def _naflex_leaks_of_all(request: pytest.FixtureRequest) -> Iterator[None]:
    # pytest sets up this fixture before every other one of a single test, so it is torn down after them.
    with no_leaks() if request.config.getoption("naflex_leaks") else nullcontext():
        yield


@contextmanager
def no_leaks() -> Iterator[None]:
    """Call ``pytest.fail`` if the block leaves a patch or kept tables, after putting back what was there before."""
    before, kept = status(), _tables()
    yield
    if _patches(status()) != _patches(before):
        gc.collect()  # a model's choice ends with the model
    after = status()
    leaks = [
        f"{what}: {_short(now)}, before: {_short(then)}"
        for (what, then), now in zip(_patches(before).items(), _patches(after).values())
        if now != then
    ]
    if not after.replaced and _tables() > kept:
        leaks.append(f"{_tables() - kept} finished tables in the cache; timm_naflex_fast.disable() drops them")
    if leaks:
        disable()
        if not before.flags.is_stock:
            enable(before.flags.pos_embed, patch_embed=before.flags.patch_embed, rope=before.flags.rope)
        pytest.fail(f"the test left {'; '.join(leaks)}", pytrace=False)


def _patches(now: Any) -> dict[str, Any]:
    models = sorted(str(flags) for flags in now.models)
    return {
        "the choice for every model": now.flags,
        "models with their own choice": models,
        "replaced methods": sorted(now.replaced),
    }


def _short(value: Any) -> str:
    return str(value) if not isinstance(value, list) else f"{len(value)} ({value[0]} ...)" if value else "none"


def _tables() -> int:
    return cache.usage()[0].get("finished tables", 0)
