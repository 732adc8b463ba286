import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# How many examples a property gets: 25 by default, 1,000 by ``pytest -m hypothesis
# --hypothesis-profile fuzz``, and by ``nox -f lab/noxfile.py -s mutants`` the same few.
every = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("project", max_examples=25, **every)
settings.register_profile("fuzz", max_examples=1000, **every)
settings.register_profile("mutation", max_examples=8, derandomize=True, database=None, **every)
settings.load_profile("project")

# With a worker for each core, each computes in one thread, and so do its children.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
# pytest-xdist gives its workers a width of 80. Tables are printed as into a file.
os.environ.pop("COLUMNS", None)
# Imports and compilers make many objects at once, which all stay.
gc.set_threshold(50_000)


def pytest_collection_finish():
    """Let the garbage collector forget what imports made: to look through that takes 0.2 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


# What imports torch is imported inside the fixtures: the process that hands tests to workers needs
# none of it.


@pytest.fixture(autouse=True)
def stock_timm():
    """Every test ends with timm as it came, nothing enabled and empty caches, or fails."""
    from tests.support import oracles
    from timm_naflex_fast import disable, status
    from timm_naflex_fast.patching.calls import STOCK
    from timm_naflex_fast.patching.choices import holding
    from timm_naflex_fast.pos_embed import kept

    def left():
        if not holding():
            return None  # status() would say so, in a hundred times as long
        now = status()
        if now.flags == STOCK and not now.models and not now.replaced:
            return None
        return now

    oracles.seed()
    yield
    kept.clear_all()  # functions fill it too, not only patches
    if left():
        gc.collect()  # a model's settings end with the model
    found = left()
    if found:
        disable()  # the next tests would fail too
        pytest.fail(f"the test left {found}", pytrace=False)
    if not oracles.is_pristine():
        disable()  # what was put on for a model that is gone stays until then
    assert oracles.is_pristine()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # one test's graphs must not count against the next one's limit
        dynamo.reset()


@pytest.fixture
def clean():
    """For tests that enable without a ``with``: everything is taken off afterwards."""
    import timm_naflex_fast

    yield
    timm_naflex_fast.disable()


@pytest.fixture
def children(tmp_path_factory):
    """A function that tells what ran in each of the child processes of the test."""
    from tests.support import running

    with running.children(tmp_path_factory.mktemp("children")) as ran_there:
        yield ran_there


@pytest.fixture
def photos(tmp_path):
    """A folder of four noisy images of different shapes and kinds."""
    import numpy as np
    from PIL import Image

    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    noise = np.random.default_rng(0)
    sizes = {"a.jpg": (300, 400), "b.png": (64, 640), "more/c.jpg": (500, 333), "d.webp": (90, 90)}
    for name, (height, width) in sizes.items():
        pixels = noise.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder
