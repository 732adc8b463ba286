"""The contract with timm: what is refused, in words, and that nothing is patched then."""

import pytest
import timm
from timm.layers import patch_embed, pos_embed_sincos
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.models import naflexvit
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg

from tests.support.oracles import defined_in, is_pristine
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching import compat as contract
from timm_naflex_fast.patching import library
from timm_naflex_fast.patching.timm import LIBRARY


@pytest.fixture
def newer(monkeypatch):
    """timm as installed, under the number of a release that nobody has seen."""
    if contract.version_of(LIBRARY) != LIBRARY.newest:
        pytest.skip("the contract for unknown releases is that of the newest known timm")
    monkeypatch.setattr(timm, "__version__", "1.0.99.dev0")


@pytest.mark.usefixtures("clean")
def test_a_newer_timm_is_patched_after_every_replaced_method_was_compared(newer, monkeypatch):
    monkeypatch.delattr(pos_embed_sincos, "RotaryEmbeddingMixed")  # a class that is gone stays timm's business
    real, checked = contract.attributes_read, set()
    monkeypatch.setattr(contract, "attributes_read", lambda function: checked.add(function) or real(function))
    enable()
    assert not is_pristine() and status().timm == "1.0.99.dev0"
    originals = {*library.originals.values()}
    assert len(originals) == len(LIBRARY.replacements) - 1 and originals <= checked
    enable("grid_sample")


def refused(*words):
    before = dict(NaFlexEmbeds.__dict__)
    with pytest.raises(RuntimeError) as error:
        enable()
    assert dict(NaFlexEmbeds.__dict__) == before and status().flags.is_stock and status().replaced == {}
    assert all(word in str(error.value) for word in words), error.value


def test_a_timm_that_is_too_old(monkeypatch):
    monkeypatch.setattr(timm, "__version__", "1.0.15")
    with pytest.raises(RuntimeError, match=r"needs timm >= 1\.0\.16; installed is 1\.0\.15"):
        enable()
    assert is_pristine()


def test_a_setting_that_is_new(newer, monkeypatch):
    def _apply_learned_pos_embed(self, x, grid_size):
        x.add_(self.pos_embed * self.pos_embed_gain * getattr(self, "pos_embed_tilt", 1))

    monkeypatch.setattr(NaFlexEmbeds, "_apply_learned_pos_embed", defined_in(naflexvit, _apply_learned_pos_embed))
    monkeypatch.setattr(
        pos_embed_sincos.RotaryEmbeddingMRope, "get_embed", lambda self, shape, dtype=None: self.inv_freq * self.gain
    )
    refused(
        "timm 1.0.99.dev0 is not supported",
        "NaFlexEmbeds._apply_learned_pos_embed now reads pos_embed_gain, pos_embed_tilt",
        "no longer reads pos_embed_align_corners, pos_embed_antialias",
        "RotaryEmbeddingMRope.get_embed now reads gain",
        "Nothing was changed",
    )


def test_a_method_that_timm_does_not_call_any_more_and_one_without_source(newer, monkeypatch):
    real, scope = contract.attributes_read, {"__name__": "timm.without_source"}
    exec("def _apply_learned_pos_embed(self, x, grid_size): pass", scope)
    monkeypatch.setattr(NaFlexEmbeds, "_apply_learned_pos_embed", scope["_apply_learned_pos_embed"])
    gone = {NaFlexEmbeds: {"_apply_factorized_pos_embed"}}
    monkeypatch.setattr(contract, "attributes_read", lambda function: real(function) - gone.get(function, set()))
    refused(
        "NaFlexEmbeds._apply_learned_pos_embed cannot be checked without its source",
        "NaFlexEmbeds does not call _apply_factorized_pos_embed any more",
    )


def test_another_default_is_refused_whatever_the_version(monkeypatch):
    def forward(self, patches, proj_weight, proj_bias=None, patch_size=None, is_linear=False):
        pass

    monkeypatch.setattr(PatchEmbedInterpolator, "forward", defined_in(patch_embed, forward))
    refused("PatchEmbedInterpolator.forward takes (self, patches", "is_linear=False")


@pytest.mark.skipif(not hasattr(NaFlexVitCfg, "rope_type"), reason="this timm has no rotary embeddings")
def test_a_missing_method_is_named(monkeypatch):
    monkeypatch.delattr(NaFlexVit, "_generate_rope_naflex")
    refused("NaFlexVit._generate_rope_naflex is missing")


def test_what_a_function_reads_of_self():
    def function(self, other):
        self.written = self.read + getattr(self, "by_getattr", 0) + other.of_another + getattr(other, "too", 0)
        setattr(self, "set", 1)  # noqa: B010
        return hasattr(self, "by_hasattr") and self.method()

    assert contract.attributes_read(function) == {"read", "by_getattr", "by_hasattr", "method"}
