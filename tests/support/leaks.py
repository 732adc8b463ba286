"""Fails a test after which timm is patched otherwise than before it."""

import gc
from contextlib import contextmanager

import pytest

from tests.support.oracles import finished_tables
from timm_naflex_fast.patching import install
from timm_naflex_fast.patching.choices import CHOICES_ATTRIBUTE
from timm_naflex_fast.patching.install import disable, status

WATCHED = ("the settings for every model", "the settings of models", "replaced methods")


@contextmanager
def no_leaks():
    """Fail the test if the block leaves a patch or kept tables; put back what was there before."""
    put_back, before, kept = _snapshot(), _patches(), finished_tables()
    yield
    if _patches() != before:
        gc.collect()  # a model's settings end with the model
    changes = []
    for what, now in _patches().items():
        if now != before[what]:
            changes.append(f"{what}: {now}, before: {before[what]}")
    if not status().replaced and finished_tables() > kept:
        changes.append("resized tables in the cache; timm_naflex_fast.disable() drops them")
    if changes:
        disable()  # kept tables too
        put_back()
        pytest.fail(f"the test left {changes[0]}", pytrace=False)  # the others follow from it


def _patches():
    now = status()
    models = sorted(map(str, now.models))
    return dict(zip(WATCHED, (now.flags, models, now.replaced), strict=True))


def _snapshot():
    """Remember what is in force; what this returns brings back exactly that, with its handles."""
    owns = [(module, vars(module).get(CHOICES_ATTRIBUTE)) for module in install._modules]
    before = [
        (choice, [module for module, own in owns if own is not None and choice in own.choices])
        for choice in install._choices
    ]

    def put_back():
        for choice, modules in before:
            choice.ended = False
            install._put_on(choice.libraries, modules, choice.settings)
            install._begin(choice, modules)

    return put_back
