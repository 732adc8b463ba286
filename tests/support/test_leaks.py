import pytest

from tests.support.leaks import no_leaks
from tests.support.oracles import embed, is_pristine, small_vit
from timm_naflex_fast import enable, status

MODEL = small_vit()


def leave_tables():
    with enable():
        embed(MODEL), embed(MODEL), embed(MODEL)


LEAVES = {
    "the settings for every model": enable,
    "the settings of models": lambda: enable("grid_sample", model=MODEL),
    "resized tables in the cache": leave_tables,
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_a_test_leaves_is_told_and_put_back(what):
    with pytest.raises(pytest.fail.Exception, match=f"left {what}"), no_leaks():
        LEAVES[what]()
    assert is_pristine() and status().replaced == {}
