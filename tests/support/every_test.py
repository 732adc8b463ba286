"""What every test runs inside, loaded where tests run: the fixtures, and the watch over what the tests claim."""

import gc
import os
import sys

import numpy as np
import oracles
import pytest
import torch
import witness
from PIL import Image

import timm_naflex_fast
from timm_naflex_fast.pytest_plugin import no_leaks
from timm_naflex_fast.resampling import cache

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker for each core: each computes in one thread, and so do its children
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

witness.watch()
if witness.FORCED:  # every test that claims something about a mode must now fail
    witness.force_stock()


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look at it again and again."""
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


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
