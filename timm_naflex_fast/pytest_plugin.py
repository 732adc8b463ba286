"""Run any test suite with timm patched: ``pytest -p timm_naflex_fast.pytest_plugin --naflex-mode matmul``."""

from __future__ import annotations

import pytest

from .patching.install import enable, status
from .patching.modes import POS_EMBED, default_mode


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--naflex-mode``."""
    help_ = f"timm_naflex_fast's mode: {', '.join(POS_EMBED)} (default: TIMM_NAFLEX_FAST_MODE, else matmul)"
    parser.getgroup("timm_naflex_fast").addoption("--naflex-mode", metavar="MODE", help=help_)


def pytest_configure(config: pytest.Config) -> None:
    """Patch timm until the run ends."""
    try:
        handle = enable(config.getoption("naflex_mode") or default_mode())
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(f"timm_naflex_fast: {error}") from error
    config.add_cleanup(handle.restore)


def pytest_report_header() -> list[str]:
    """Say what the tests run with."""
    return str(status()).splitlines()
