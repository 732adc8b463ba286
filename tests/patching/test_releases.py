"""The contract with timm: what is refused, in words."""

import inspect

import pytest
import timm
from timm.layers import patch_embed, pos_embed_sincos
from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize as Resampler
from timm.models import naflexvit
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit

from tests.support.oracles import defined_in, is_pristine
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching.timm_methods import LIBRARY

LATER = "1.0.99.dev0"


@pytest.fixture
def newer(monkeypatch):
    """timm as installed, under the number of a release that nobody has seen."""
    if timm.__version__ != LIBRARY.newest:
        pytest.skip("the contract for unknown releases is that of the newest known timm")
    monkeypatch.setattr(timm, "__version__", LATER)


def refused(*words):
    before = dict(vars(NaFlexEmbeds))
    with pytest.raises(RuntimeError) as error:
        enable()
    assert dict(vars(NaFlexEmbeds)) == before
    assert status().replaced == {}
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.usefixtures("clean")
def test_the_oldest_timm_and_a_newer_one_that_is_the_same_are_patched(newer, monkeypatch):
    # A class that is gone stays timm's business.
    monkeypatch.delattr(pos_embed_sincos, "RotaryEmbeddingMixed")
    for version in (LATER, "1.0.16"):
        monkeypatch.setattr(timm, "__version__", version)
        enable()
        assert not is_pristine()
        assert status().timm == version
        disable()


def test_every_replaced_method_is_compared(newer, monkeypatch):
    with enable():
        replaced = status().replaced
    owners = {cls.__name__: cls for cls in (NaFlexEmbeds, NaFlexVit, Resampler)}
    changed = lambda self: self.gain
    for label in replaced:
        owner, name = label.split(".")
        monkeypatch.setattr(owners[owner], name, defined_in(naflexvit, changed))
    refused(*(f"{label} reads what it did not, or no longer: " for label in replaced))


def test_a_release_that_reads_or_calls_something_else(newer, monkeypatch):
    def _apply_learned_pos_embed(self, x, grid_size):  # not what a comment says: self.comment
        scale = hasattr(self, "pos_embed_norm") and getattr(x, "of_another", 0)
        x.add_(self.pos_embed * self.pos_embed_gain * getattr(self, "pos_embed_tilt", 1) + scale)

    changed = defined_in(naflexvit, _apply_learned_pos_embed)
    monkeypatch.setattr(NaFlexEmbeds, "_apply_learned_pos_embed", changed)
    monkeypatch.delattr(pos_embed_sincos.RotaryEmbeddingMRope, "get_embed")
    no_longer_called = "_apply_factorized_pos_embed"
    real = inspect.getsource
    source = real(NaFlexEmbeds).replace(f"self.{no_longer_called}(", "self.another(")
    monkeypatch.setattr(
        inspect, "getsource", lambda found: source if found is NaFlexEmbeds else real(found)
    )
    refused(
        f"timm {LATER} is not supported",
        "NaFlexEmbeds._apply_learned_pos_embed reads what it did not, or no longer: "
        "pos_embed_align_corners, pos_embed_antialias, pos_embed_ar_preserving, pos_embed_gain, "
        "pos_embed_interp_mode, pos_embed_norm, pos_embed_tilt;",
        "RotaryEmbeddingMRope.get_embed is missing, or has no source",
        f"nothing calls NaFlexEmbeds.{no_longer_called} any more",
        "Nothing was changed",
    )


def test_what_is_refused_whatever_the_version(monkeypatch):
    changed = lambda self, patch_embed, new_size, gain=None: None
    monkeypatch.setattr(Resampler, "forward", defined_in(patch_embed, changed))
    monkeypatch.delattr(NaFlexEmbeds, "_apply_factorized_pos_embed")
    missing = "NaFlexEmbeds._apply_factorized_pos_embed is missing"
    refused("FixedOrigSize.forward takes (self, patch_embed, new_size, gain=None)", missing)
    monkeypatch.setattr(timm, "__version__", "1.0.15")
    refused("timm 1.0.15 is not supported by this timm_naflex_fast (1.0.16 to ", "it is too old")
    monkeypatch.delattr(patch_embed, Resampler.__name__)
    refused("lacks what timm_naflex_fast replaces", f"no attribute '{Resampler.__name__}'")
