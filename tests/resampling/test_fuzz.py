"""``pytest -m fuzz``: the properties of the other tests on more than 10,000 configurations, new ones on every run."""

import pytest
import test_coordinates
import test_exact
import test_interpolate
import test_patch_kernels
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cases
from test_patch_kernels import side

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]
modes = st.sampled_from(["bilinear", "bicubic"])


def property_of(test):
    """What a hypothesis test does with one example."""
    return test.hypothesis.inner_test


@settings(max_examples=4000)
@given(cases())
def test_matmul_learned(case):
    property_of(test_exact.test_learned_equals_timm_forward_and_gradients)(case)


@settings(max_examples=1000)
@given(cases(dtypes=test_exact.HALF))
def test_matmul_half_precision(case):
    property_of(test_exact.test_half_precision_x_is_equal_but_for_ties)(case)


@settings(max_examples=1000)
@given(cases(dtypes=(torch.float32, *test_exact.HALF)))
def test_bit_identical(case):
    property_of(test_interpolate.test_learned_is_bit_identical)(case)


@settings(max_examples=1000)
@given(cases(kind="factorized", antialias=True, align_corners=False))
def test_matmul_factorized(case):
    property_of(test_exact.test_factorized_equals_timm_forward_and_gradients)(case)


@settings(max_examples=2000)
@given(st.tuples(side, side), st.tuples(side, side), modes, st.booleans())
def test_kernels(base, size, mode, antialias):
    property_of(test_patch_kernels.test_equals_timm)(base, size, mode, antialias)


@settings(max_examples=5000)
@given(st.integers(0, 2**32 - 1))
def test_scribbled_coordinates(seed):
    test_coordinates.check_coordinates(seed)
