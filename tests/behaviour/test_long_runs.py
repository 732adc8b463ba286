"""What long-running programs do: threads, worker processes and switching on and off for ever"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.checks import slow
from tests.support.oracles import BATCH, embed, small_vit, vit_batch
from tests.support.running import ran, running
from timm_naflex_fast import disable, enable, status


@ran("matmul", component="patch_embed")
@ran("matmul", "interpolate_cached")
def test_threads_train_and_infer_while_others_switch():
    batch = BATCH | {"patches": torch.randn(*BATCH["patches"].shape[:2], 3, 5, 1)}  # not 4 x 4

    def work(model):
        out = model(batch)
        grads = torch.autograd.grad(out.square().sum(), [model.embeds.pos_embed, model.embeds.proj.weight])
        with torch.no_grad():
            return out.detach(), *grads, model(batch)

    models = [small_vit(enable_patch_interpolator=True, depth=1) for _ in range(2)]
    want, stop, done = work(models[0]), threading.Event(), [0, 0]

    def keep_working(number):
        while not stop.is_set():
            for got, wanted in zip(work(models[number]), want):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
            done[number] += 1

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(keep_working, number) for number in range(2)]
        try:
            while min(done) < 10 and not any(thread.done() for thread in threads):
                for mode in ("matmul", "interpolate_cached", "stock"):
                    enable(mode, model=models[0])
                    enable(mode)
                    time.sleep(1e-3)  # else this thread lets the others run far too seldom
                    with enable("matmul"):
                        pass
                    disable()
        finally:
            stop.set()
        for thread in threads:
            thread.result()  # raises what the thread raised


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
