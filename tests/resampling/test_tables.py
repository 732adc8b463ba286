"""What tables and references say; contract/ compares what they compute with timm."""

import pytest
import torch
from timm.models.naflexvit import NaFlexEmbeds

from timm_naflex_fast.resampling.spec import (
    FLAG,
    LOOP,
    OLDER_FLAG,
    ResizeSpec,
    factorized_spec,
    learned_spec,
)
from timm_naflex_fast.resampling.tables import PositionTable

LEARNED = PositionTable((torch.zeros(1, 6, 5, 4),))
LINES = PositionTable((torch.zeros(1, 6, 4), torch.zeros(5, 4)))


@pytest.mark.parametrize("table", [LEARNED, LINES])
def test_a_leading_1_does_not_count(table):
    assert table.size == (6, 5)
    assert table.channels == 4
    assert table.whole().shape[-3:] == (6, 5, 4)


def test_a_learned_table_is_antialiased_as_told_but_not_under_timms_flag():
    for reference in (LOOP, FLAG, OLDER_FLAG):
        spec = learned_spec("bicubic", True, False, False, reference)
        assert spec.antialias == (reference == LOOP)
        assert spec.reference == reference


@pytest.mark.parametrize(
    ("chosen", "follows"), [(LOOP, LOOP), (FLAG, OLDER_FLAG), (OLDER_FLAG, OLDER_FLAG)]
)
def test_of_a_models_options_factorized_tables_have_ar_preserving_alone(chosen, follows):
    assert factorized_spec(True, chosen) == ResizeSpec("linear", False, False, True, follows)


def test_a_table_is_its_own_embeddings_only_in_timms_loop_and_lines_not_in_a_square():
    assert ResizeSpec(reference=FLAG).own_size((6, 5)) is None
    assert ResizeSpec(ar_preserving=True).own_size((6, 5)) == (6, 5)
    assert factorized_spec(False, LOOP).own_size((6, 5)) == (6, 5)
    assert factorized_spec(True, LOOP).own_size((6, 5)) is None


def test_the_methods_of_timms_that_references_follow_exist():
    for kind in ("learned", "factorized"):
        for suffix in ("", "_grid_sample"):
            assert hasattr(NaFlexEmbeds, f"_apply_{kind}_naflex_pos_embed{suffix}")
