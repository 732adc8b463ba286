"""The recording in this repository is whole, small, and of one set of weights."""

import csv
import json
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


def test_its_grids_are_of_every_kind(kit):
    grids = [tuple(picture["grid"]) for picture in kit.about["pictures"]]
    most = kit.about["max_patches"]
    rows, columns = kit.about["table_size"]
    kinds = {
        "square, no padding": lambda h, w: h == w and h * w == most,
        "tall": lambda h, w: h > w > 1,
        "wide": lambda h, w: w > h > 1,
        "one row": lambda h, w: (h, w) == (1, most),
        "one column": lambda h, w: (h, w) == (most, 1),
        "padding": lambda h, w: h * w < most,
        "smaller than the table": lambda h, w: h < rows and w < columns,
        "higher than the table": lambda h, w: h > rows and w > 1,
        "wider than the table": lambda h, w: w > columns and h > 1,
        "as high as the table": lambda h, w: h == rows,
    }
    missing = [name for name, fits in kinds.items() if not any(fits(*grid) for grid in grids)]
    assert not missing


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
    lines = (KIT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = list(csv.reader((line for line in lines if line.startswith("| 0")), delimiter="|"))
    for number, (row, picture) in enumerate(zip(rows, kit.about["pictures"], strict=True)):
        _, shown, name, _, size, grid, *_ = [cell.strip() for cell in row]
        assert (int(shown), name) == (number, picture["name"])
        assert size == "{} x {}".format(*picture["size"])
        assert grid == "{} x {}".format(*picture["grid"])
