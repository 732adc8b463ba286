import pytest

import timm_naflex_fast


@pytest.fixture(autouse=True)
def put_back():
    """The tests in this folder patch models and libraries freely; this takes everything off again."""
    yield
    timm_naflex_fast.disable()
