"""What worker processes of a data loader compute."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.checks import slow
from tests.support.oracles import embed, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable, status


def embedded(model, seed):
    return embed(model, vit_batch([(3, 4), (5, 2)], seed=seed)), status().calls


@pytest.mark.parametrize("method", ["fork", slow("spawn")])
def test_models_in_dataloader_workers(method):
    model = small_vit().requires_grad_(False)
    want = [embedded(model, seed)[0] for seed in range(4)]
    # Exact in this process; in a spawned one timm is as it came.
    with enable("grid_sample"), running("interpolate_cached", model=model):
        embed(model), embed(model)
        options = dict(batch_size=None, num_workers=1, multiprocessing_context=method)
        loader = DataLoader(range(4), collate_fn=partial(embedded, model), **options)
        for (got, calls), item in zip(loader, want, strict=True):
            torch.testing.assert_close(got, item, atol=1e-6, rtol=0)
            assert (("pos_embed", "interpolate_cached") in calls) == (method == "fork")
