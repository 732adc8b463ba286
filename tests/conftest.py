import os
import sys

import numpy as np
import oracles
import pytest
import torch
import witness
from hypothesis import HealthCheck, settings
from PIL import Image

import timm_naflex_fast
from timm_naflex_fast.pytest_plugin import no_leaks
from timm_naflex_fast.resampling import cache

# How many examples a property gets: 25 by default, 1,000 by ``pytest -m hypothesis --hypothesis-profile fuzz``, and for
# each mutant of tools/mutation.py the same few.
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

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker for each core: each computes in one thread, and so do its children
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


witness.watch()
if witness.FORCED:  # every test that claims something about a mode must now fail
    witness.force_stock()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that claims something about a mode fails if that mode's code did not run in it."""
    claims, overruled = witness.claims(pyfuncitem), witness.overruled.total() - witness.overruled["stock"]
    try:
        with witness.ran(*claims):
            return (yield)
    finally:
        if claims or witness.overruled.total() - witness.overruled["stock"] > overruled:
            pyfuncitem.user_properties.append(("asks for ours", True))


def pytest_terminal_summary(terminalreporter):
    """After a run with NAFLEX_TESTS_FORCE_STOCK=FILE: how many tests noticed, and those that did not."""
    if not witness.FORCED:
        return
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


@pytest.fixture(autouse=True)
def stock_timm():
    """Every test starts with timm as it came, and the one that does not end with it fails."""
    assert oracles.is_pristine()
    torch.manual_seed(0)
    with no_leaks():
        yield
        cache.clear_all()  # functions fill it too, not only patches
    assert oracles.is_pristine()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else one test's graphs count against the next one's limit of recompiles


@pytest.fixture
def clean():
    """For tests about ``enable`` and ``disable`` without a ``with``: everything is taken off afterwards."""
    yield
    timm_naflex_fast.disable()


@pytest.fixture
def children(tmp_path_factory):
    """A function that tells what ran in the child processes of the test; its claims may then speak of them."""
    with witness.children(tmp_path_factory.mktemp("children")) as ran_there:
        yield ran_there


@pytest.fixture
def photos(tmp_path):
    """A folder of four images of different shapes and kinds, all black."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for name, (h, w) in (("a.jpg", (300, 400)), ("b.png", (64, 640)), ("more/c.jpg", (500, 333)), ("d.webp", (90, 90))):
        Image.fromarray(np.zeros((h, w, 3), np.uint8)).save(folder / name)
    return folder
