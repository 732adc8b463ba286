import os

from hypothesis import HealthCheck, settings

# How many examples a property gets: 25 by default, 1,000 by ``pytest -m hypothesis --hypothesis-profile fuzz``, and for
# each mutant of mutmut the same few.
for profile, examples in (("project", 25), ("fuzz", 1000), ("mutation", 8)):
    settings.register_profile(
        profile,
        max_examples=examples,
        derandomize=profile == "mutation",
        database=None if profile == "mutation" else settings.default.database,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
settings.load_profile("project")


def pytest_configure(config):
    """Load the fixtures where tests run. The process that hands tests to workers runs none: it spares the imports."""
    if config.getoption("dist", "no") == "no" or config.option.collectonly:
        config.pluginmanager.import_plugin("every_test")


def pytest_terminal_summary(terminalreporter):
    """After a run with NAFLEX_TESTS_FORCE_STOCK=FILE: how many tests noticed, and those that did not."""
    if "NAFLEX_TESTS_FORCE_STOCK" not in os.environ:
        return
    import witness

    stats, asks = terminalreporter.stats, ("asks for ours", True)
    red, green = (
        [report.nodeid for report in stats.get(kind, []) if report.when == "call" and asks in report.user_properties]
        for kind in ("failed", "passed")
    )
    witness.write_outcome(red, green)
    terminalreporter.section("timm's own code ran in place of ours")
    terminalreporter.line(f"{len(red)} of the {len(red) + len(green)} tests that ask for ours are red")
    for name in green:
        terminalreporter.line(f"green: {name}")


def pytest_addoption(parser):
    group = parser.getgroup("SigLIP-2", "drift on the real weights (tests/models/test_siglip2.py)")
    group.addoption("--siglip2-weights", metavar="FILE", help="local file of the weights; else they come from the hub")
    group.addoption("--siglip2-model", choices=("base", "so400m"), default="base", help="which tower (base)")
    group.addoption("--siglip2-results", metavar="FILE", help="write what was measured there, as JSON")
