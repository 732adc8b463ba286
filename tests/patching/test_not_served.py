"""Classes that nobody may take for one that is replaced are named: those that their library lists,
and copies."""

import ast
import re
from pathlib import Path

import pytest
from torch import nn

from timm_naflex_fast import disable, enable, status

transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
vilt = pytest.importorskip("transformers.models.vilt.modeling_vilt")
pytestmark = pytest.mark.usefixtures("clean")
# Of transformers' classes; of the first two kinds each loops over grids in some known release.
SERVED = {
    "Siglip2VisionEmbeddings",
    "Cosmos3EdgeVisionEmbeddings",
    "RadioPatchEmbeddings",
    "HunYuanVLVisionPatchEmbed",
}
LISTED = {"ViltEmbeddings", "HYV4VLVisionPatchEmbed"}
LOOPS = (ast.For, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
TABLE = re.compile(r"self\.pos\w*emb\w* = nn\.(Parameter|Embedding)\(")
RESIZES = re.compile(r"\b(F\.|functional\.)interpolate\(|grid_sample\(|interpolate_pos|resize_pos")


def loops_over_grids(cls):
    """Whether a class (its syntax tree) makes a position table, and resizes one in a loop."""
    if not TABLE.search(ast.unparse(cls)):
        return False
    loops = [node for node in ast.walk(cls) if isinstance(node, LOOPS)]
    return any(RESIZES.search(ast.unparse(loop)) for loop in loops)


def test_every_class_that_loops_over_grids_is_served_or_listed():
    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if TABLE.search(text) and RESIZES.search(text):
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            found |= {cls.name for cls in classes if loops_over_grids(cls)}
    enable(library="transformers")
    assert {name.split(".")[0] for name in status().replaced} == SERVED
    assert found <= SERVED | LISTED
    # Siglip2 is no loop since transformers 5.24; the second of the list is newer than 5.23.
    assert found >= (SERVED | LISTED) - {"Siglip2VisionEmbeddings", "HYV4VLVisionPatchEmbed"}


def served():
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    return siglip2.Siglip2VisionEmbeddings(config)


def listed():
    how = dict(hidden_size=8, num_attention_heads=1, image_size=16, patch_size=4)
    return vilt.ViltEmbeddings(transformers.ViltConfig(**how))


def copied():
    """Siglip2's embeddings as a repository's own code has them."""
    words = dict(vars(siglip2.Siglip2VisionEmbeddings), __module__="remote_code")
    words["__init__"] = nn.Module.__init__
    return type("Siglip2VisionEmbeddings", (nn.Module,), words)()


NAMES = {
    listed: "transformers.models.vilt.modeling_vilt.ViltEmbeddings",
    copied: "remote_code.Siglip2VisionEmbeddings",
}
by_kind = pytest.mark.parametrize("made", NAMES)


def sentence(name):
    return f"nothing is replaced in {re.escape(name)}: position tables are resized there by other"


def test_status_names_what_is_loaded_once_its_library_is_patched():
    enable()
    assert "ViltEmbeddings" not in str(status())
    enable(library="transformers")
    assert re.search(sentence(NAMES[listed]), str(status()))


@by_kind
def test_a_model_that_contains_it(made):
    derived = served()
    derived.__class__ = type("Derived", (siglip2.Siglip2VisionEmbeddings,), {})
    fine = nn.ModuleList([served(), derived])
    both = nn.ModuleList([served(), made()])
    with enable(library="transformers", strict=True):
        assert status(fine).notes == ()
        (note,) = status(both).notes
    assert re.match(sentence(NAMES[made]), note)
    with pytest.raises(RuntimeError, match=f"{sentence(NAMES[made])}.* Nothing was changed"):
        enable(model=both, strict=True)
    assert status().replaced == {}
    # Nothing of it was chosen, or it is in no model that was.
    enable(model=both, pos_embed="stock", strict=True)
    enable(model=fine, strict=True)
    refused = f"no timm.*{sentence(NAMES[made])}.*valid is any"
    for ask in (status, disable, lambda model: enable(model=model)):
        with pytest.raises(ValueError, match=refused):
            ask(nn.Sequential(made()))
