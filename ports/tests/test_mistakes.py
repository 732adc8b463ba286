"""Each known mistake is found in a port that makes it: at its stage, with its words.

The port is that of ``examples/`` with the wrong line, from the pictures or the pixels on.
``test_compare.py`` plants faults in transformers' tower, which knows nothing of the list.
"""

from pathlib import Path

import pytest
import torch
from vit_ports.compare import compare_recordings
from vit_ports.format import Unusable, read_about
from vit_ports.mistakes import mistakes_of, read_mistakes

from tests.support import tiny_recordings

KIT = Path(__file__).parents[1] / "kit"
DEPTH = 3
MISTAKES = {mistake.name: mistake for mistake in mistakes_of(DEPTH)}
NOT_SHOWN = {
    # What the reference itself does.
    "bilinear",
    "mean_and_std_half",
    "tanh_gelu",
    # No picture of the tiny recording has a grid of one column, nor is it small; in the kit they show.
    "interpolate_unbatched",
    "grid_rounded",
    "not_enlarged",
    # What these LayerNorms take is too large there; a test below makes it small.
    "pooling_eps_1e-5",
    "last_norm_eps_1e-5",
    "last_norm_eps_1e-3",
}
# Those that give the same numbers where a port parts that makes one of them.
SAME = [
    {"area_opencv", "box_jimp"},
    {"bicubic_not_antialiased", "bicubic_not_antialiased_float"},
    {"grid_width_first", "turned_left", "turned_right"},
    # In the pooled output alone.
    {"bgr", "kernel_bgr"},
    {"patch_cyx", "kernel_cyx_read"},
    {"patch_xyc", "kernel_xyc"},
    {"normalized_twice", "pixels_normalized_again"},
    {"no_last_norm", "pooled_before_norm"},
    {"grid_width_first", "size_transposed"},
]


@pytest.fixture(scope="module")
def reference():
    _, recording = tiny_recordings.reference()
    return recording


def is_told(words, name):
    """Whether these are the words of a mistake, or of one that gives the same numbers."""
    same = {name}
    for names in SAME:
        if name in names:
            same |= names
    return words in {MISTAKES[one].words for one in same}


def test_each_mistake_shows_in_the_recording_and_in_the_kit(reference):
    shown = {one["name"] for one in reference.about["mistakes"]}
    assert shown == MISTAKES.keys() - NOT_SHOWN
    kit = read_about(KIT)
    shown = {one["name"] for one in kit["mistakes"]}
    every = {mistake.name for mistake in mistakes_of(2)}
    assert shown == every - {"bilinear", "mean_and_std_half", "tanh_gelu"}


@pytest.mark.parametrize("name", sorted(MISTAKES.keys() - NOT_SHOWN))
def test_a_port_with_a_mistake_is_told_so(name, reference):
    ports = tiny_recordings.port_with(MISTAKES[name])
    found = compare_recordings(reference, ports)
    (entry,) = [one for one in reference.about["mistakes"] if one["name"] == name]
    assert found.first.stage == entry["stage"]
    assert is_told(found.reason.words, name)
    assert found.reason.pictures == found.first.parting

    # From the right pixels the pooled output alone is enough.
    if MISTAKES[name].start != "picture":
        alone = [{"pooled": port["pooled"]} for port in ports]
        assert is_told(compare_recordings(reference, alone).reason.words, name)


@pytest.mark.parametrize(
    ("text", "line"),
    [("- right", 1), ("[norm]\nname: words\n+ wrong", 3), ("[norm]\n\nno words", 3)],
)
def test_a_list_that_cannot_be_read_names_the_line(text, line, tmp_path):
    file = tmp_path / "mine.diff"
    file.write_text(text)
    with pytest.raises(Unusable, match=rf"mine.diff, line {line}: valid: \[stage\]"):
        read_mistakes(file)


def test_a_tower_of_another_activation_has_mistakes_of_the_other_stages_alone():
    model = tiny_recordings.tiny_model(depth=1)
    model.blocks[0].mlp.act = torch.nn.ReLU()
    tried = [MISTAKES[name] for name in ("no_patch_bias", "no_first_norm", "no_last_norm")]
    pictures = tiny_recordings.smooth_pictures()[:1]
    recording = tiny_recordings.recording_of(model, pictures, tried)
    names = [one["name"] for one in recording.about["mistakes"]]
    assert names == ["no_patch_bias", "no_last_norm"]


# timm as a port.


@pytest.fixture
def tower():
    """timm's tower, which a test may spoil."""
    return tiny_recordings.source_of(tiny_recordings.tiny_model())


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_right_port_is_equal_in_its_precision(precision, tower, reference):
    ports = tower.tower(reference.stages, getattr(torch, precision))
    found = compare_recordings(reference, ports, precision)
    assert found.first is None and found.reason is None


def test_padding_that_timm_does_not_mask_is_told(tower, reference):
    """The port in NumPy takes one picture at a time: here timm itself makes the mistake."""
    for block in tower.model.blocks:
        block.attn.register_forward_pre_hook(
            lambda module, args, options: (args, {}), with_kwargs=True
        )
    found = compare_recordings(reference, tower.tower(reference.stages))
    assert found.first.stage == "block_0"
    assert found.reason.words == "padding is not masked in the blocks"
