"""Run any test suite with timm patched: ``pytest -p timm_naflex_fast.pytest_plugin --naflex-mode
matmul``."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from .patching.choices import MODES, default_mode
from .patching.install import enable, status

CHOSEN: pytest.StashKey[Any] = (
    pytest.StashKey()
)  # its counts, what it replaced, and what was counted already


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--naflex-mode`` and ``--naflex-library``."""
    add, modes = parser.getgroup("timm_naflex_fast").addoption, ", ".join(MODES)
    add(
        "--naflex-mode",
        metavar="MODE",
        help=f"of {modes} (default: TIMM_NAFLEX_FAST_MODE, else matmul)",
    )
    several = "timm (default), transformers, torchtitan; repeatable"
    add("--naflex-library", metavar="NAME", action="append", help=several)


def pytest_configure(config: pytest.Config) -> None:
    """Patch the library until the run ends."""
    libraries = config.getoption("naflex_library")
    try:
        handle = enable(
            config.getoption("naflex_mode") or default_mode(), library=tuple(libraries or ["timm"])
        )
    except (ValueError, RuntimeError) as error:
        raise pytest.UsageError(f"timm_naflex_fast: {error}") from error
    config.add_cleanup(handle.restore)
    config.stash[CHOSEN] = handle._choice.counts, status().replaced, Counter()


def pytest_report_header() -> list[str]:
    """Say what the tests run with."""
    return str(status()).splitlines()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write into a test's last report what ran by what was chosen, and whether that still holds:
    xdist hands it on."""
    outcome: Any = yield
    if call.when == "teardown":
        counts, replaced, before = item.config.stash[CHOSEN]
        ran = Counter(counts.calls) - before
        before.update(ran)
        outcome.get_result().naflex = (
            [[*key, n] for key, n in ran.items()],
            status().replaced == replaced,
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what ran, and after which test timm was patched otherwise than chosen."""
    reports = [
        report
        for kind in terminalreporter.stats.values()
        for report in kind
        if hasattr(report, "naflex")
    ]
    ran: Counter[str] = Counter()
    for step, strategy, n in (row for report in reports for row in report.naflex[0]):
        ran[f"{step} by {strategy}"] += n
    terminalreporter.section("timm_naflex_fast")
    terminalreporter.line(
        ", ".join(f"{what} {n} times" for what, n in sorted(ran.items())) or "nothing of ours ran"
    )
    if changed := [report.nodeid for report in reports if not report.naflex[1]]:
        so = f"{len(changed)} of {len(reports)} tests ended so"
        terminalreporter.line(f"switched off or changed by {changed[0]}; {so}")
