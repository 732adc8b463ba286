"""A plugin of pytest, for ``nox -f lab/noxfile.py -s forced_stock``: wherever ours would run, the library's own code
runs in its place.

A test in which ours would have run is marked in pytest's report.
"""

import functools

import pytest

from timm_naflex_fast.patching import calls
from timm_naflex_fast.tracing import constant_while_traced

asked = []


@constant_while_traced
def note():
    asked.append(True)


def with_forced(self, compute):
    @functools.wraps(compute)  # whose arguments are compared with the library's
    def forced(*_, **__):
        note()
        return "forced"

    replace(self, forced)
    return compute


replace = calls.Replacement.__call__
calls.Replacement.__call__ = with_forced


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    asked.clear()
    yield
    item.user_properties.extend([("asks for ours", True)] * bool(asked))
