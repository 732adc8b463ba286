"""What is kept: bounded in bytes, oldest use out first."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from tests.support.checks import during
from tests.support.oracles import finished_tables, kept_tensors, row_major
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    resample_patch_kernel,
    resample_pos_embeds,
)
from timm_naflex_fast.resampling import kept


def nbytes():
    """The bytes that are counted, which must be those of what is kept, at least."""
    counted = kept._nbytes
    assert counted == sum(map(kept._bytes_of, kept._entries.values()))
    assert counted >= sum(tensor.nbytes for tensor in kept_tensors())
    return counted


def met(source, *sizes):
    """Ask for a table of each size, made from ``source``: the sizes of those not kept yet."""
    made = []

    def resize(copies, size):
        made.append(size)
        return torch.ones(1000)

    tables = list(kept.kept_of((source,), list(sizes), resize))
    assert len(tables) == len(sizes)
    for table in tables:
        assert torch.equal(table, torch.ones(1000))
    return made


def imported_again(monkeypatch, setting):
    """The module as a process imports it in which the environment says so."""
    monkeypatch.setenv("TIMM_NAFLEX_FAST_CACHE_MIB", setting)
    spec = spec_from_file_location(f"{kept.__name__}_again", kept.__file__)
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@pytest.mark.parametrize(
    ("setting", "mib"), [("", 512), ("0", 0), ("64", 64), ("16777216", 16777216)]
)
def test_the_limit_is_that_of_the_environment_or_512_mib(setting, mib, monkeypatch):
    assert imported_again(monkeypatch, setting)._limit == mib * 2**20


@pytest.mark.parametrize("setting", ["abc", "-1", "1e3", "inf", "64.0", "9" * 5000])
def test_a_limit_that_is_no_number_of_mib_is_named(setting, monkeypatch):
    message = f"TIMM_NAFLEX_FAST_CACHE_MIB must be .* 0 .* or more; got '{setting[:40]}'"
    with pytest.raises(ValueError, match=message):
        imported_again(monkeypatch, setting)


def test_all_kinds_together_stay_below_the_limit(monkeypatch):
    monkeypatch.setattr(kept, "_limit", 2 * 2**20)
    table = torch.randn(32, 32, 16)
    for n in range(1, 40):
        for _ in range(3):
            resample_pos_embeds(table, [(n, 41 - n), (2 * n, 3)], mode="bicubic")
        assert 0 < nbytes() <= 2 * 2**20
    # Most of the count is memory really held.
    assert sum(tensor.nbytes for tensor in kept_tensors()) > 2**20

    kept.clear_all()
    assert nbytes() == 0


def test_what_was_not_used_for_the_longest_time_goes_first(monkeypatch):
    first, second, third = torch.zeros(3, 10)
    monkeypatch.setattr(kept, "_limit", 10_000)  # of two tables
    size = (1, 1)
    for source in (first, second):
        assert met(source, size) == [size]
    assert met(first, size) == []

    assert met(third, size) == [size]

    assert met(first, size) == []
    assert met(second, size) == [size]


@pytest.mark.parametrize("change", ["add_", "forget"])
def test_what_replaces_an_entry_is_counted_in_its_place(monkeypatch, change):
    table = torch.ones(10)
    sizes = [(1, 1), (2, 2), (3, 3)]
    met(table, *sizes)
    full = nbytes()
    monkeypatch.setattr(kept, "_limit", full)  # exactly what is needed

    if change == "add_":
        table.add_(1)
    else:
        kept.forget((table,))
    assert met(table, *sizes) == sizes

    assert nbytes() == full
    assert finished_tables() == 3


def test_what_is_too_large_to_keep_is_returned_all_the_same(monkeypatch):
    monkeypatch.setattr(kept, "_limit", 100)
    assert met(torch.zeros(10), (1, 1)) == [(1, 1)]
    assert nbytes() == 0


@pytest.mark.parametrize("changed", [0, 1])
def test_what_is_kept_is_dropped_when_any_source_changes(changed):
    sources = (torch.zeros(3), torch.zeros(3))

    def first_source(copies, key):
        return copies[0][:]

    list(kept.kept_of(sources, ["made"], first_source))
    addresses = {tensor.data_ptr() for tensor in kept_tensors()}
    assert len(addresses) == 3  # two copies, and no view of one

    sources[changed].add_(1)

    assert not kept._made_of(sources).made


def test_what_another_thread_made_meanwhile_counts_once():
    source = torch.zeros(3)

    def resize(copies, key):
        met(source, key)  # as another thread would
        return copies[0]

    list(kept.kept_of((source,), ["made"], resize))
    assert nbytes()


def test_autocast_reaches_nothing_that_is_kept():
    product = kept.kept_by_arguments(lambda n: torch.ones(n, n) @ torch.ones(n, n))
    with torch.autocast("cpu"):
        assert product(2).dtype is torch.float32


COORD = row_major([(3, 4)] * 3 + [(7, 1)])  # 7 / 3 is no number of bfloat16


def results(strategy, table, line, kernel):
    """What all that keeps something computes."""
    sizes = [(3, 4), (9, 2), (30, 1)]
    sums = resample_pos_embeds(table, sizes, mode="bicubic", strategy=strategy)
    x = torch.zeros(4, 12, 4, device="cpu", dtype=torch.float32)
    lines = add_factorized_pos_embed_(x, line, line, COORD, strategy=strategy)
    return [sums, lines, resample_patch_kernel(kernel, (5, 60))]


def gradients_and_results(strategy, tensors):
    kept.clear_all()
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    total = sum(out.square().sum() for out in results(strategy, *leaves))
    found = list(torch.autograd.grad(total, leaves))
    kept.clear_all()
    for _ in range(3):  # at last of a table that is kept
        found += results(strategy, *tensors)
    return found


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
def test_what_is_kept_is_made_where_the_table_is_in_float32_whatever_the_defaults_are(strategy):
    tensors = [torch.randn(6, 5, 4), torch.randn(6, 4), torch.randn(2, 3, 8, 8)]
    want = gradients_and_results(strategy, tensors)
    with torch.device("meta"), during(torch.set_default_dtype, torch.bfloat16, after=torch.float32):
        got = gradients_and_results(strategy, tensors)
        assert all(map(torch.equal, got, want))
    assert {tensor.device.type for tensor in kept_tensors()} == {"cpu"}
