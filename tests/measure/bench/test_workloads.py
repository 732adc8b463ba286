"""The bench's material: workloads against their description, folders of images, and what a timed
step does."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.nn.utils.rnn import pad_sequence

from tests.support.oracles import NEW_TIMM
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.bench.workloads import (
    WORKLOADS,
    coordinates,
    folder_workload,
    read_sizes,
)


@pytest.mark.parametrize(("name", "workload"), WORKLOADS.items())
def test_grids_are_seeded_and_a_small_batch_begins_a_large_one(name, workload):
    assert workload.grids(40) == workload.grids(40) == workload.grids(60)[:40]
    assert workload.grids(1) == workload.grids(2)[:1] and len(workload.grids(60)) == 60
    assert (len({*workload.grids(40)}) > 1) == (name != "single")


def test_siglip_grids_are_as_large_as_fits():
    grids = np.array(WORKLOADS["siglip"].grids(1000))
    # One more row and column never fits, and aspects fill [1/3, 3] evenly in the logarithm.
    assert (grids.prod(1) <= 256).all() and ((grids + 1).prod(1) > 256).all()
    logs = np.log(grids[:, 1] / grids[:, 0]) / np.log(3)
    shares = np.histogram(logs, [-1.15, -1 / 3, 1 / 3, 1.15])[0] / len(
        logs
    )  # the sum of all is 1 if none lies outside
    assert (
        abs(logs.mean()) < 0.1
        and np.abs(shares - 1 / 3).max() < 0.08
        and shares.sum() == pytest.approx(1)
    )


@pytest.mark.skipif(NEW_TIMM, reason="this timm has the options")
def test_old_timm_cannot_have_a_radio_table(capsys):
    assert cli.main(["bench", "--workload", "radio"]) == 2
    assert "not run: workload radio, whose table this timm cannot have" in capsys.readouterr().out


@pytest.mark.parametrize(("length", "patch"), [(256, 16), (100, 14), (37, 8)])
def test_folder_grids_are_those_of_timms_pipeline_by_the_headers_alone(
    photos, length, patch, monkeypatch
):
    settings = dict(patch_size=patch, max_seq_len=length, patchify=True, interpolation="bicubic")
    transform = create_transform((3, 64, 64), naflex=True, **settings)
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    coords = [transform(Image.open(path).convert("RGB"))["patch_coord"] for path in files]
    want = [tuple((coord.amax(0) + 1).tolist()) for coord in coords]
    assert torch.equal(
        coordinates(want), pad_sequence(coords, batch_first=True)
    )  # as the collator pads
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    assert read_sizes(photos, length, patch) == (want, []) and len(set(want)) == 4


def test_batches_of_a_folder_are_drawn_evenly_from_all_and_take_each_image_before_any_again():
    images = [(1, n) for n in range(1, 11)]
    workload = folder_workload("somewhere/photos", images, WORKLOADS["diverse"])
    assert (workload.name, workload.table, workload.mode) == ("photos", (32, 32), "bicubic")
    grids = workload.grids(25)
    assert sorted(grids[:10]) == sorted(grids[10:20]) == images and grids[:10] != images
    assert workload.grids(25) == grids and len(set(grids[20:])) == 5
    files = [(16, 16)] * 90 + [(n, 20) for n in range(1, 16)]  # the first ones are alike
    assert len(set(folder_workload("x", files[90:], WORKLOADS["siglip"]).grids(8))) == 8
    some = folder_workload("x", files, WORKLOADS["siglip"]).grids(16)
    assert 12 <= some.count((16, 16)) <= 15
