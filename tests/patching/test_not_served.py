"""Classes that resize a position table by code of their own are named, by one rule for all."""

import re

import pytest
import timm
import torch
from torch import nn

from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching.not_served import resizes_table

transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
pytestmark = pytest.mark.usefixtures("clean")


def module_of(name):
    """A file of transformers, loaded as one of its models loads it."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def served():
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    return siglip2.Siglip2VisionEmbeddings(config)


def fixed():
    """SigLIP of a fixed resolution."""
    how = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = transformers.SiglipVisionConfig(**how, image_size=16, patch_size=4)
    return transformers.SiglipVisionModel(config)


@pytest.fixture
def copied():
    """Siglip2's embeddings as a repository's own code has them."""
    theirs = siglip2.Siglip2VisionEmbeddings

    def init(self):
        nn.Module.__init__(self)
        self.position_embedding = nn.Embedding(16, 8)

    words = dict(__init__=init, __module__="remote_code", forward=theirs.forward)
    words["resize_positional_embeddings"] = theirs.resize_positional_embeddings
    return type("Siglip2VisionEmbeddings", (nn.Module,), words)()


class ByFunction(nn.Module):
    """No name says what it does."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 4, 8))

    def forward(self, size):
        one = lambda: nn.functional.interpolate(self.pos_embed, size=size)
        return one()


class OfPictures(nn.Module):
    """Resizes pictures, and has a table that it does not resize."""

    def __init__(self):
        super().__init__()
        self.query_position_embeddings = nn.Embedding(4, 8)

    def forward(self, pixels):
        return nn.functional.interpolate(pixels, size=(3, 4))


class OfWords(nn.Module):
    def resize_position_embeddings(self, number):
        """transformers' name in every model, for another number of words."""


OTHERS = {
    "siglip": "SiglipVisionEmbeddings",
    "vilt": "ViltEmbeddings",
    "clip": "CLIPVisionEmbeddings",
    "qwen3_vl": "Qwen3VLVisionModel",
    "dinov2": "Dinov2Embeddings",
    "glm4v": "Glm4vVisionEmbeddings",
    "timesformer": "TimesformerEmbeddings",
}
NOT = [
    ("siglip", "SiglipVisionModel"),
    ("siglip", "SiglipTextEmbeddings"),
    ("siglip2", "Siglip2Model"),
    ("clip", "CLIPTextEmbeddings"),
    ("bert", "BertEmbeddings"),
    ("dinov3_vit", "DINOv3ViTEmbeddings"),
    ("detr", "DetrConvEncoder"),
]


@pytest.mark.parametrize(("name", "cls"), OTHERS.items())
def test_what_resizes_a_table_is_known_by_its_code(name, cls):
    assert resizes_table(getattr(module_of(name), cls))


@pytest.mark.parametrize(("name", "cls"), NOT)
def test_what_resizes_none_is_not(name, cls):
    assert not resizes_table(getattr(module_of(name), cls))


def test_names_are_not_all():
    assert resizes_table(ByFunction)
    assert resizes_table(type("Derived", (ByFunction,), {}))
    assert not resizes_table(OfPictures)
    assert not resizes_table(OfWords)


SENTENCE = "nothing is replaced in .*{}.*: position tables are resized there by other code"


def test_status_names_what_was_loaded_with_a_model_once_its_library_is_patched():
    named = re.compile(SENTENCE.format("ViltEmbeddings"))
    module_of("vilt")
    enable()
    assert not named.search(str(status()))  # nothing of transformers is patched
    enable(library="transformers")
    assert named.search(str(status()))
    for name in ("Siglip2Vision", "PreTrained"):
        assert name not in status().notes[-1]


def test_status_of_a_model_names_what_it_contains():
    enable(library="transformers")
    derived = served()
    derived.__class__ = type("Derived", (siglip2.Siglip2VisionEmbeddings,), {})
    assert status(served()).notes == status(derived).notes == ()
    both = nn.ModuleList([served(), fixed(), ByFunction()])
    (note,) = status(both).notes
    assert re.match(SENTENCE.format(f"SiglipVisionEmbeddings, {__name__}.ByFunction"), note)


@pytest.mark.parametrize("ask", [status, disable, lambda model: enable(model=model)])
def test_a_model_of_which_nothing_is_replaced_is_refused_by_the_names_of_its_classes(ask):
    sentence = SENTENCE.format("SiglipVisionEmbeddings")
    with pytest.raises(ValueError, match=f"contains no timm.*{sentence}.*valid is any"):
        ask(fixed())
    with pytest.raises(ValueError, match=SENTENCE.format("VisionTransformer")):
        ask(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=1))


def test_it_is_an_error_under_strict_in_the_model_that_is_given():
    both = nn.ModuleList([fixed(), served()])
    with pytest.raises(RuntimeError, match=r"SiglipVisionEmbeddings.* Nothing was changed"):
        enable(model=both, strict=True)
    assert status().replaced == {}
    # Nothing of it was chosen, or it is in no model that was.
    enable(model=both, pos_embed="stock", strict=True).restore()
    enable(model=both[1], strict=True).restore()
    enable(library="transformers", strict=True)


def test_a_copy_in_code_of_its_own_is_named(copied, monkeypatch):
    sentence = SENTENCE.format("remote_code.Siglip2VisionEmbeddings")
    for ask in (status, lambda model: enable(model=model)):
        with pytest.raises(ValueError, match=sentence):
            ask(nn.Sequential(copied))
    enable(library="transformers")
    (note,) = status(nn.ModuleList([copied, served()])).notes
    assert re.match(sentence, note)
    # As transformers names what comes with a checkpoint.
    monkeypatch.setattr(type(copied), "__module__", "transformers_modules.somebody.modeling")
    assert "transformers_modules.somebody.modeling.Siglip2VisionEmbeddings" in str(status())
