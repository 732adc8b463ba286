"""What the tests of bench and drift measure: rows of a result, small batches, a small model."""

import torch

from tests.support.oracles import small_vit, vit_batch

GRIDS = [(3, 4), (5, 2), (6, 6), (2, 9)]


def row(contender="matmul", **changes):
    values = dict(
        suite="model",
        workload="siglip",
        phase="train",
        batch=64,
        dtype="float32",
        about={"device": "cpu", "model": "tiny"},
        rounds=5,
        median_ms=10.0,
    )
    return {"contender": contender, **values, **changes}


def batches(labels=False):
    for seed in range(2):
        yield vit_batch(GRIDS, seed=seed), torch.tensor([0, 1, 2, 3]) if labels else None


def table_model(**kwargs):
    return small_vit(pos_embed_interp_mode="bilinear", **kwargs).eval()
