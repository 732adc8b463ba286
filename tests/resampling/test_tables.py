"""What the kinds of table and the references say; contract/ compares what they compute with timm."""

from dataclasses import fields

import pytest
import torch
from timm.models.naflexvit import NaFlexEmbeds

from timm_naflex_fast.resampling.spec import FLAG, LOOP, OLDER_FLAG, REFERENCES, ResizeSpec
from timm_naflex_fast.resampling.tables import FactorizedTables, LearnedTable

LEARNED = LearnedTable((torch.zeros(1, 6, 5, 4),))
FACTORIZED = FactorizedTables((torch.zeros(1, 6, 4), torch.zeros(5, 4)))
both_kinds = pytest.mark.parametrize("tables", [LEARNED, FACTORIZED])


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_kinds_answer_the_same_questions():
    assert public(LearnedTable) == public(FactorizedTables)


@both_kinds
def test_a_leading_1_does_not_count(tables):
    assert tables.size == (6, 5)
    assert tables.channels == 4
    assert [tensor.shape for tensor in tables.without_leading_1] == tables.shapes


def test_a_learned_table_is_antialiased_as_told_but_not_under_timms_flag():
    for reference in (LOOP, FLAG, OLDER_FLAG):
        spec = LEARNED.spec_of(ResizeSpec("bicubic", antialias=True, reference=reference))
        assert spec.antialias == (reference is LOOP)
        assert spec.reference is reference


@pytest.mark.parametrize(
    ("chosen", "follows"), [(LOOP, LOOP), (FLAG, OLDER_FLAG), (OLDER_FLAG, OLDER_FLAG)]
)
def test_of_a_models_options_factorized_tables_have_ar_preserving_alone(chosen, follows):
    spec = FACTORIZED.spec_of(ResizeSpec("bicubic", True, True, True, chosen))
    assert spec == ResizeSpec("linear", False, False, True, follows)


def test_only_a_learned_table_is_its_own_embeddings_and_only_in_timms_loop():
    assert LEARNED.own_size(ResizeSpec(reference=LOOP)) == (6, 5)
    assert LEARNED.own_size(ResizeSpec(reference=FLAG)) is None
    assert FACTORIZED.own_size(FACTORIZED.spec_of(ResizeSpec())) is None


def test_no_two_references_give_the_same_answers():
    answers = set()
    for reference in REFERENCES.values():
        named = (getattr(reference, field.name) for field in fields(reference))
        answers.add(tuple(answer for answer in named if isinstance(answer, bool)))
    assert len(answers) == 3


def test_the_methods_of_timms_that_references_follow_exist():
    for kind in ("learned", "factorized"):
        for suffix in ("", "_grid_sample"):
            assert hasattr(NaFlexEmbeds, f"_apply_{kind}_naflex_pos_embed{suffix}")
