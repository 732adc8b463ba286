"""Each known mistake is found in a port that makes it: at its stage, with its words.

The port is that in NumPy with the wrong line, on the kit, from the pictures or the pixels on.
"""

from dataclasses import replace

import numpy as np
import pytest
from on_the_kit import pictures, port_with, recording, weights

from vit_ports.compare import compare_recordings
from vit_ports.format import Unusable
from vit_ports.mistakes import TRIED, mistakes_of, read_mistakes, with_mistakes
from vit_ports.towers.siglip2 import SIGLIP2

MISTAKES = {mistake.name: mistake for mistake in mistakes_of(SIGLIP2, 2)}
NOT_SHOWN = {"bilinear", "mean_and_std_half", "tanh_gelu"}  # what the reference itself does
HIDDEN = {"table_in_float16"}  # in the pooled output
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


def is_told(words, name):
    """Whether these are the words of a mistake, or of one that gives the same numbers."""
    same = {name}
    for names in SAME:
        if name in names:
            same |= names
    return words in {MISTAKES[one].words for one in same}


@pytest.mark.parametrize("name", sorted(MISTAKES.keys() - NOT_SHOWN))
def test_a_port_with_a_mistake_is_told_so(name):
    reference = recording()
    (entry,) = [one for one in reference.about["mistakes"] if one["name"] == name]
    kept = entry["pictures"][:TRIED]
    ports = port_with(MISTAKES[name], kept)
    found = compare_recordings(reference, ports)
    assert found.first.stage == entry["stage"]
    assert is_told(found.reason.words, name)
    assert list(found.reason.pictures) == kept

    # From the right pixels the pooled output alone is enough.
    if MISTAKES[name].start != "picture" and name not in HIDDEN:
        alone = [{"pooled": port["pooled"]} if port else {} for port in ports]
        assert is_told(compare_recordings(reference, alone).reason.words, name)


def test_a_recording_gets_them_as_the_kit_did():
    kit = recording()
    without = replace(kit, about={**kit.about, "mistakes": []}, mistakes={})
    tried = [MISTAKES[name] for name in ("bgr", "tanh_gelu", "no_first_norm")]
    made = with_mistakes(SIGLIP2, without, weights(), pictures(), tried)
    names = [one["name"] for one in made.about["mistakes"]]
    assert names == ["bgr", "no_first_norm"]
    wanted = {name for name in kit.mistakes if name.split("/")[0] in names}
    assert made.mistakes.keys() == wanted
    for name in wanted:
        rounding = 3e-4 if name.endswith("pixels") else 1e-5  # the kit has pixels in float16
        np.testing.assert_allclose(made.mistakes[name], kit.mistakes[name], rtol=0, atol=rounding)


def test_a_tower_of_another_activation_has_mistakes_of_the_other_stages_alone():
    relu = replace(recording(), stages=port_with(MISTAKES["relu"], range(10)), mistakes={})
    tried = [MISTAKES[name] for name in ("no_patch_bias", "no_first_norm", "no_last_norm")]
    made = with_mistakes(SIGLIP2, relu, weights(), pictures()[:1], tried)
    names = [one["name"] for one in made.about["mistakes"]]
    assert names == ["no_patch_bias", "no_last_norm"]


@pytest.mark.parametrize(
    ("text", "line"),
    [("- right", 1), ("[norm]\nname: words\n+ wrong", 3), ("[norm]\n\nno words", 3)],
)
def test_a_list_that_cannot_be_read_names_the_line(text, line, tmp_path):
    file = tmp_path / "mine.diff"
    file.write_text(text)
    with pytest.raises(Unusable, match=rf"mine.diff, line {line}: valid: \[stage\]"):
        read_mistakes(file)
