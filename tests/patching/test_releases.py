"""The contract with timm: what is refused, in words."""

import importlib

import pytest
import timm
from timm.layers import patch_embed, pos_embed_sincos
from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize as RESAMPLER
from timm.models import naflexvit
from timm.models.naflexvit import NaFlexEmbeds

from tests.support.oracles import defined_in, is_pristine
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching import releases as contract
from timm_naflex_fast.patching.calls import STOCK
from timm_naflex_fast.patching.timm_methods import LIBRARY


@pytest.fixture
def newer(monkeypatch):
    """timm as installed, under the number of a release that nobody has seen."""
    if contract.installed(LIBRARY) != LIBRARY.newest:
        pytest.skip("the contract for unknown releases is that of the newest known timm")
    monkeypatch.setattr(timm, "__version__", "1.0.99.dev0")


def test_each_method_that_would_be_compared_is_there(newer):
    for path, methods in LIBRARY.reads.items():
        module, _, owner = path.partition(":")
        for name in methods:
            assert hasattr(getattr(importlib.import_module(module), owner), name)


@pytest.mark.usefixtures("clean")
def test_a_newer_timm_is_patched_after_every_replaced_method_was_compared(newer, monkeypatch):
    # A class that is gone stays timm's business.
    monkeypatch.delattr(pos_embed_sincos, "RotaryEmbeddingMixed")
    real = contract.attributes_of
    checked = set()
    monkeypatch.setattr(
        contract, "attributes_of", lambda function: checked.add(function) or real(function)
    )
    enable()
    assert not is_pristine()
    assert status().timm == "1.0.99.dev0"
    replaced = {each.original for each in LIBRARY.replacements.values()}
    assert len(replaced) == len(LIBRARY.replacements)
    (unchecked,) = replaced - checked
    assert unchecked.__name__ == "resample_patch_embed"


def refused(*words):
    before = dict(vars(NaFlexEmbeds))
    with pytest.raises(RuntimeError) as error:
        enable()
    assert dict(vars(NaFlexEmbeds)) == before
    assert status().flags == STOCK
    assert all(word in str(error.value) for word in words), error.value


def test_a_release_that_reads_or_calls_something_else(newer, monkeypatch):
    real = contract.attributes_of
    without_source = "_apply_factorized_naflex_pos_embed"
    scope = {"__name__": "timm.without_source"}
    # With a file's name of its own: Python 3.13 knows what "<string>" holds, the line that started
    # pytest's worker.
    exec(compile(f"def {without_source}(self, x, patch_coord): pass", "<nowhere>", "exec"), scope)

    def _apply_learned_pos_embed(self, x, grid_size):  # not what a comment says: self.comment
        scale = hasattr(self, "pos_embed_norm") and getattr(x, "of_another", 0)
        x.add_(self.pos_embed * self.pos_embed_gain * getattr(self, "pos_embed_tilt", 1) + scale)

    changed = defined_in(naflexvit, _apply_learned_pos_embed)
    monkeypatch.setattr(NaFlexEmbeds, "_apply_learned_pos_embed", changed)
    get_embed = lambda self, shape, dtype=None: self.inv_freq * self.gain
    monkeypatch.setattr(pos_embed_sincos.RotaryEmbeddingMRope, "get_embed", get_embed)
    monkeypatch.setattr(NaFlexEmbeds, without_source, scope[without_source])
    gone = {NaFlexEmbeds: {"_apply_factorized_pos_embed"}}
    monkeypatch.setattr(
        contract, "attributes_of", lambda function: real(function) - gone.get(function, set())
    )
    refused(
        "timm 1.0.99.dev0 is not supported",
        "NaFlexEmbeds._apply_learned_pos_embed reads what it did not, or no longer: "
        "pos_embed_align_corners, pos_embed_antialias, pos_embed_ar_preserving, pos_embed_gain, "
        "pos_embed_interp_mode, pos_embed_norm, pos_embed_tilt;",
        "RotaryEmbeddingMRope.get_embed reads what it did not, or no longer: ",
        f"NaFlexEmbeds.{without_source} is missing, or has no source",
        "nothing calls NaFlexEmbeds._apply_factorized_pos_embed any more",
        "Nothing was changed",
    )


def test_what_is_refused_whatever_the_version(monkeypatch):
    changed = lambda self, patch_embed, new_size, gain=None: None
    monkeypatch.setattr(RESAMPLER, "forward", defined_in(patch_embed, changed))
    monkeypatch.delattr(NaFlexEmbeds, "_apply_factorized_pos_embed")
    missing = "NaFlexEmbeds._apply_factorized_pos_embed is missing"
    refused("FixedOrigSize.forward takes (self, patch_embed, new_size, gain=None)", missing)
    monkeypatch.setattr(timm, "__version__", "1.0.15")
    refused("timm 1.0.15 is not supported by this timm_naflex_fast (1.0.16 to ", "it is too old")
    monkeypatch.delattr(patch_embed, RESAMPLER.__name__)
    refused("lacks what timm_naflex_fast replaces", f"no attribute '{RESAMPLER.__name__}'")
