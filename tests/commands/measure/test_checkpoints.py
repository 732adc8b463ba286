"""SigLIP-2 weights in the forms of three libraries: the same tower, and nothing left out."""

import pytest
import torch
from safetensors.torch import save_file

from tests.support import tiny_siglip2
from tests.support.tiny_siglip2 import FAMILY, TIMM_SIZES
from timm_naflex_fast.commands.measure.checkpoints import read_checkpoint
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.tower_names import from_transformers, to_transformers
from timm_naflex_fast.commands.measure.weight_files import find_weights

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def whole():
    return tiny_siglip2.whole_model()


@pytest.fixture(scope="module")
def tower(whole):
    return dict(whole.vision_model.state_dict())


@pytest.fixture(scope="module")
def headless():
    """A tower as LFM2-VL and other language models hold it."""
    return tiny_siglip2.tower(vision_use_head=False)


def save_in_form(form, whole, folder):
    """The folder or file of one form, in which people have the weights."""
    if form == "folder":
        whole.save_pretrained(folder)
        return folder
    if form == "shards":
        whole.save_pretrained(folder, max_shard_size="200KB")
        assert len([*folder.glob("*.safetensors")]) > 2
        return folder / "model.safetensors.index.json"
    file = folder / "weights.safetensors"
    tower = whole.vision_model.state_dict()
    trunk = from_transformers(tower)
    states = {
        "file": whole.state_dict(),
        "tower alone": tower,
        "open_clip": {f"visual.trunk.{name}": trunk[name] for name in trunk},
        "timm": trunk,
    }
    save_file(states[form], file)
    return file


@pytest.mark.parametrize("form", ["folder", "shards", "file", "tower alone", "open_clip", "timm"])
def test_every_form_is_recognised_and_gives_the_same_tower(form, whole, tower, tmp_path):
    path = save_in_form(form, whole, tmp_path)
    found = read_checkpoint(find_weights(path))
    expected = from_transformers(tower)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_both_directions_give_the_tensors_back(tower, headless):
    for state in (tower, getattr(headless, "vision_model", headless).state_dict()):
        back = to_transformers(from_transformers(state))
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_tower_without_a_head_that_pools_gives_its_tokens(headless, tmp_path):
    headless.save_pretrained(tmp_path)
    # Older releases of timm would resample the table by bicubic.
    more = dict(global_pool="", pos_embed_interp_mode="bilinear")
    model, _ = load_model(FAMILY, tmp_path, **TIMM_SIZES, **more)
    patches = torch.randn(1, 12, 768)
    coord = torch.cartesian_prod(torch.arange(3), torch.arange(4))[None]
    valid = torch.ones(1, 12, dtype=torch.bool)
    with torch.no_grad():
        tokens = model(patches, coord, valid)
        theirs = headless(patches, valid, torch.tensor([[3, 4]])).last_hidden_state
    torch.testing.assert_close(tokens, theirs)


KEY = "encoder.layers.1.self_attn.k_proj.weight"
# What is taken out of a tower, what is put in, and what is said.
CHANGES = {
    "a block short of a tensor": (
        [KEY],
        {},
        rf"no NaFlex tower of SigLIP-2: it lacks {KEY} \(1\)",
    ),
    "one tensor more": (
        [],
        {"embeddings.cls_token": (1,)},
        r"no NaFlex tower of SigLIP-2: it lacks none; it also has embeddings.cls_token",
    ),
    "a table that is no square": (
        [],
        {"embeddings.position_embedding.weight": (50, 64)},
        r"shape '\[1, 7, 7, 64\]' is invalid for input of size 3200",
    ),
    "two towers": (
        None,
        {"student.embeds.proj.weight": (1,), "teacher.embeds.proj.weight": (1,)},
        r"2 image towers in one file \(student., teacher.\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tower_that_is_not_whole_is_an_error_with_numbers_and_names(change, tower, tmp_path):
    without, more, says = CHANGES[change]
    state = {} if without is None else {key: tower[key] for key in tower if key not in without}
    state |= {name: torch.ones(shape) for name, shape in more.items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=says):
        load_model(FAMILY, tmp_path, **TIMM_SIZES)


def test_a_table_of_another_size_leads_to_the_function_that_resizes_it(whole, tmp_path):
    file = save_in_form("timm", whole, tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch.*functional\.resample_pos_embed$"):
        load_model(FAMILY, file, **TIMM_SIZES | {"pos_embed_grid_size": (9, 9)})


def test_a_lost_shard_is_named(whole, tmp_path):
    index = save_in_form("shards", whole, tmp_path)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(RuntimeError, match=rf"index.json cannot be loaded \(.*{lost.name}"):
        load_model(FAMILY, index)
