"""One cache for everything: bounded in bytes, oldest use out first, free of weak references, safe
to fork."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.support.checks import during
from tests.support.oracles import kept_tensors, row_major
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    resample_patch_kernel,
    resample_pos_embeds,
)
from timm_naflex_fast.patching import install
from timm_naflex_fast.resampling import kept
from timm_naflex_fast.resampling.matrices import affine_positions


def nbytes():
    counted = kept.stats()[1]
    assert (
        counted
        == sum(map(kept._bytes_of, kept._entries.values()))
        >= sum(t.nbytes for t in kept_tensors())
    )
    return counted


def met(source, *sizes):
    """Ask for a table of each size, made from ``source``: the sizes of those that were not kept."""
    made = []
    build = lambda copies, size: made.append(size) or torch.ones(1000)
    tables = list(kept.cached_resized((source,), list(sizes), build))
    assert all(torch.equal(table, torch.ones(1000)) for table in tables) and len(tables) == len(
        sizes
    )
    return made


def test_all_kinds_together_stay_below_the_limit(monkeypatch):
    monkeypatch.setattr(kept, "_limit", 2 * 2**20)
    table = torch.randn(32, 32, 16)
    for n in range(1, 40):
        for _ in range(3):
            resample_pos_embeds(table, [(n, 41 - n), (2 * n, 3)], mode="bicubic")
        assert 0 < nbytes() <= 2 * 2**20
    assert 2**20 < sum(t.nbytes for t in kept_tensors())  # most of the count is memory really held
    kinds = r": \d+ axis taps, \d+ resize steps, \d+ resized tables and kernels"
    assert re.fullmatch(f"{nbytes() / 2**20:.1f} of 2 MiB cached" + kinds, kept.report())
    kept.clear_all()
    assert kept.report() == "0.0 of 2 MiB cached"


def test_what_other_threads_use_meanwhile_does_not_disturb_the_count():
    """A key hashes in Python, so another thread may look a table up while this one adds up their
    bytes."""

    class Key:
        def __hash__(self):
            if entry:  # as another thread would
                kept._get(entry[0].made, (1, 1)), entry[0].made.setdefault(object())
            return 0

    table, entry = torch.zeros(10), []
    met(table, (1, 1), Key(), Key())
    entry.append(next(iter(kept._entries.values())))
    assert kept.stats()[0] == {kept.RESIZED: 3} and kept.stats()[1] > 3 * 4000
    kept.invalidate(table)
    assert kept.stats()[1] == 0


def test_oldest_use_out_first(monkeypatch):
    table, source = torch.zeros(10), torch.zeros(1000)
    other = kept.cached("others")(lambda n: np.zeros(1000, np.float32))
    monkeypatch.setattr(kept, "_limit", 3 * 4400 + 1000)
    made = [met(table, (n, n)) for n in (1, 2, 3, 1, 4)]
    assert [len(sizes) for sizes in made] == [1, 1, 1, 0, 1]
    assert met(table, (1, 1)) == []  # used since (2, 2), so still here
    assert met(table, (2, 2)) == [(2, 2)]  # the oldest use, so dropped
    monkeypatch.setattr(kept, "_limit", 4 * 4500)
    met(source, (1, 1))
    for n in range(5):
        assert met(source, (1, 1)) == []  # the copy of the source is used as recently as its tables
        other(n)
    assert other(4) is other(4) and nbytes() and kept.stats()[0] == {kept.RESIZED: 1, "others": 2}
    kept.clear_all()
    met(table, (1, 1), (2, 2), (3, 3))
    full = nbytes()
    for change in (table.zero_, lambda: table.add_(1), lambda: kept.invalidate(table)):
        change()
        monkeypatch.setattr(kept, "_limit", full)  # exactly what is needed
        met(table, (1, 1), (2, 2), (3, 3))
        assert nbytes() == full and kept.stats()[0] == {kept.RESIZED: 3}
    monkeypatch.setattr(kept, "_limit", nbytes() + 500)
    other(1)
    assert (
        met(table, (2, 2), (3, 3)) == []
    )  # the oldest table goes before the copy that all of them need
    monkeypatch.setattr(kept, "_limit", 100)
    assert (
        met(torch.zeros(10), (1, 1)) == [(1, 1)] and nbytes() == 0
    )  # too large to keep, and returned all the same


def test_what_was_asked_for_is_forgotten_when_any_source_changes():
    sources = torch.zeros(3), torch.zeros(3)
    for source in sources:
        kept.resized_by_key(sources)["asked for"] = None
        list(kept.cached_resized(sources, ["made"], lambda copies, _: copies[0][:]))
        assert (
            len({tensor.data_ptr() for tensor in kept_tensors()}) == 3
        )  # two copies, and no view of one
        source += 1
        assert not kept.resized_by_key(sources) and not nbytes() > 128
    list(
        kept.cached_resized(
            sources[:1], ["made"], lambda copies, key: met(sources[0], key) and copies[0]
        )
    )
    assert nbytes()  # as where another thread has made the same meanwhile: it counts once
    copy = kept._copy(torch.zeros(1))
    copy.memory[:] = torch.ones(1).numpy().tobytes()
    assert copy.tensor.item() == 1  # what is built comes from what is compared
    with torch.autocast("cpu"):  # which reaches nothing that is kept
        assert (
            kept.cached("products")(lambda n: torch.ones(n, n) @ torch.ones(n, n))(2).dtype
            is torch.float32
        )


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
def test_what_is_kept_is_made_where_the_table_is_in_float32_whatever_the_defaults_are(strategy):
    tensors = torch.randn(6, 5, 4), torch.randn(6, 4), torch.randn(2, 3, 8, 8)
    coord, zeros = (
        row_major([(3, 4)] * 3 + [(7, 1)]),
        torch.zeros(4, 12, 4),
    )  # 7 / 3 is no number of bfloat16

    def results(table, line, kernel):
        sums = resample_pos_embeds(
            table, [(3, 4), (9, 2), (30, 1)], mode="bicubic", strategy=strategy
        )
        sums += resample_pos_embeds(
            table, [(2, 30)], mode="bicubic", strategy=strategy, merge=2
        ).sum()
        lines = add_factorized_pos_embed_(zeros.clone(), line, line, coord, strategy=strategy)
        return sums, lines, resample_patch_kernel(kernel, (5, 60)), affine_positions(3, 7)

    def gradients_and_results():
        kept.clear_all()
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        gradients = torch.autograd.grad(sum(out.square().sum() for out in results(*leaves)), leaves)
        kept.clear_all()
        return [
            *gradients,
            *(out for _ in range(3) for out in results(*tensors)),
        ]  # at last of a finished table

    want = gradients_and_results()
    with torch.device("meta"), during(torch.set_default_dtype, torch.bfloat16, after=torch.float32):
        assert all(map(torch.equal, gradients_and_results(), want))
    assert all(tensor.device.type == "cpu" for tensor in kept_tensors())


LAYOUTS = {
    "contiguous": lambda whole: whole[:-1],
    "transposed": lambda whole: whole.transpose(0, 2),
    "offset": lambda whole: whole[1:],
    "last axis of length 1": lambda whole: whole[:1].permute(1, 2, 0),
    "one number": lambda whole: whole[::2, ::2, ::2][:1, :1, :1],
}


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("shape", [(4, 4, 4), (3, 5, 3)], ids=["whole words", "odd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_layout_and_shape_is_compared_bit_by_bit(dtype, shape, layout):
    source = LAYOUTS[layout]((torch.randn(shape[0] + 1, *shape[1:]) * 9).to(dtype))
    assert [len(met(source, (1, 1))) for _ in range(3)] == [1, 0, 0]
    source[-1, -1, -1] += 1
    assert met(source, (1, 1)) == [(1, 1)]
    source.data = source.data.flatten(0, 1)
    assert met(source, (1, 1)) == [(1, 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("lock", [kept._lock, install._lock], ids=["cache", "install"])
def test_a_fork_waits_for_who_holds_a_lock_and_leaves_it_free(lock):
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.3)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        held.wait()
        child = os.fork()
        if child == 0:  # PyTorch itself is not safe to use here
            os._exit(0 if not lock._is_owned() and lock.acquire(timeout=5) else 1)
    assert not lock._is_owned() and os.waitpid(child, 0)[1] == 0
