"""The recording in this repository is whole, small, and of one set of weights."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.numpy import load_file

from timm_naflex_fast.commands.measure.tower_names import to_transformers
from timm_naflex_fast.commands.recordings.format import read_recording, sha256

KIT = Path(__file__).parents[3] / "recordings" / "siglip2_naflex_tiny"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def kit():
    return read_recording(KIT)


def test_it_is_small():
    assert sum(file.stat().st_size for file in KIT.rglob("*") if file.is_file()) <= MOST_BYTES


def test_its_weights_are_those_that_were_recorded(kit):
    assert sha256(KIT / "weights" / "big_vision.npz") == kit.about["weights"]["sha256"]


def test_its_pictures_are_those_that_were_recorded_and_each_is_resized(kit):
    patch = kit.about["patch_size"]
    for picture in kit.about["pictures"]:
        assert sha256(KIT / picture["file"]) == picture["sha256"]
        with Image.open(KIT / picture["file"]) as opened:
            assert [opened.height, opened.width] == picture["size"]
            assert opened.mode == "RGB"
        for pixels, cells in zip(picture["size"], picture["grid"]):
            assert pixels != patch * cells


GRIDS = {
    "wider than the table, with padding": (2, 22),
    "square, without padding, smaller than the table": (8, 8),
    "tall": (10, 6),
    "wide": (5, 10),
    "as high as the table": (12, 4),
    "one row": (1, 64),
    "one column": (64, 1),
    "higher than the table, a token of padding": (21, 3),
    "both numbers odd": (7, 9),
}


def test_its_grids_are_of_every_kind(kit):
    assert (kit.about["max_patches"], kit.about["table_size"]) == (64, [12, 12])
    grids = {tuple(picture["grid"]) for picture in kit.about["pictures"]}
    assert grids == set(GRIDS.values())


def test_its_limits_leave_room_for_lower_precisions(kit):
    for stage in kit.order[2:]:
        limits = kit.limits[stage]
        for measure, limit in limits["float32"].items():
            assert limit < limits["float16"][measure] <= limits["tf32"][measure]
            assert limits["float16"][measure] < limits["bfloat16"][measure]


def test_the_weights_are_the_same_in_three_forms():
    model = timm.create_model(
        "naflexvit_base_patch16_siglip.v2_webli",
        pretrained=False,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        pos_embed_grid_size=(12, 12),
    )
    model.load_pretrained(str(KIT / "weights" / "big_vision.npz"))
    own = model.state_dict()
    for name, wanted in {"timm": own, "transformers": to_transformers(own)}.items():
        written = load_file(KIT / "weights" / f"{name}.safetensors")
        assert written.keys() == wanted.keys()
        for key, numbers in written.items():
            assert np.array_equal(numbers, wanted[key].numpy())
            assert numbers.std() > 0.001, key  # flax begins with zeros and ones


def test_the_original_in_float32_is_within_the_limits_of_float32(kit):
    file = KIT.parents[1] / "results" / "recordings" / "jax_float64.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["made"] == kit.about["written_by"]
    for stage, share in found["stages"].items():
        assert 0 < share <= min(kit.limits[stage]["float32"].values())


def test_its_readme_names_each_picture(kit):
    page = (KIT / "README.md").read_text(encoding="utf-8")
    for number, picture in enumerate(kit.about["pictures"]):
        height, width = picture["size"]
        h, w = picture["grid"]
        first = rf"\| {number:03} \| {picture['name']} \| \w+ "
        sizes = rf"\| {height} x {width} \| {h} x {w} \|"
        assert re.search(first + sizes, page)
    assert page.count("\n| 0") == len(kit.about["pictures"])
