"""The bench's material: grids against their description, and folders of images."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.nn.utils.rnn import pad_sequence

from timm_naflex_fast.commands.measure.bench.workloads import coordinates, fit, siglip_workload
from timm_naflex_fast.commands.measure.images import image_sources, read, size


def test_random_grids_are_as_large_as_fits():
    workload = siglip_workload(256)
    assert workload.grids(40) == workload.grids(60)[:40]  # a small batch begins a large one
    h, w = np.array(workload.grids(1000)).T
    # One more row and column never fits.
    assert (h * w <= 256).all() and ((h + 1) * (w + 1) > 256).all()
    # Aspects lie in [1/3, 3], as many tall ones as wide ones.
    logs = np.log(w / h) / np.log(3)
    assert np.abs(logs).max() < 1.15 and abs(logs.mean()) < 0.1


def test_folder_grids_are_those_of_timms_pipeline_by_the_headers_alone(photos, monkeypatch):
    settings = dict(patch_size=14, max_seq_len=100, patchify=True, interpolation="bicubic")
    transform = create_transform((3, 64, 64), naflex=True, **settings)
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    coords = [transform(Image.open(path).convert("RGB"))["patch_coord"] for path in files]
    want = [tuple((coord.amax(0) + 1).tolist()) for coord in coords]
    assert len(set(want)) == 4

    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were decoded"))
    grids = [fit(*found, 100, 14) for _, found in read(image_sources(photos, []), size, [])]
    assert grids == want
    assert torch.equal(coordinates(grids), pad_sequence(coords, batch_first=True))  # as collated
