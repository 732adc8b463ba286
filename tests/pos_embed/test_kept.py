"""What is kept of tables that do not train: found by their bits, bounded, freed by ``disable()``.

``contract/test_frozen_tables.py`` asks whether what is found is right.
"""

import os
import subprocess
import sys
from collections import OrderedDict
from importlib.util import module_from_spec, spec_from_file_location
from unittest import mock

import pytest
import torch

from timm_naflex_fast import disable
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.pos_embed import kept


def embed(table, size=(3, 4)):
    return resample_pos_embeds(table, [size], mode="bilinear")


def is_resampled(table, size=(3, 4)):
    """Whether a call sums over the table's cells, or finds all that it needs."""
    with mock.patch.object(torch, "embedding_bag", wraps=torch.embedding_bag) as sums:
        embed(table, size)
    return sums.called


def imported_again(monkeypatch, setting):
    """The module as a process imports it in which the environment says so."""
    monkeypatch.setenv("TIMM_NAFLEX_FAST_CACHE_MIB", setting)
    spec = spec_from_file_location(f"{kept.__name__}_again", kept.__file__)
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


@pytest.mark.parametrize("setting", ["abc", "-1", "1e3", "64.0"])
def test_a_limit_that_is_no_number_of_mib_is_named(setting, monkeypatch):
    message = f"TIMM_NAFLEX_FAST_CACHE_MIB must be a whole number of MiB; got '{setting}'"
    with pytest.raises(ValueError, match=message):
        imported_again(monkeypatch, setting)


@pytest.mark.parametrize(("setting", "mib"), [("", 512), ("64", 64), ("0", 0)])
def test_the_limit_is_that_of_the_environment_or_512_mib(setting, mib, monkeypatch):
    assert imported_again(monkeypatch, setting)._limit == mib * 2**20


@pytest.mark.parametrize("size", [(3, 4), (5, 5)])
def test_a_size_is_kept_from_its_second_call_on_and_until_disable(size):
    table = torch.randn(4, 4, 8)
    for _ in range(3):  # another size
        embed(table, (4, 3))
    for _ in range(2):
        assert [is_resampled(table, size) for _ in range(4)] == [True, True, False, False]
        disable()


def test_over_the_limit_what_was_not_used_for_the_longest_time_goes_first(monkeypatch):
    table = torch.randn(4, 4, 50_000)
    oldest, used, newer, newest = (1, 8), (2, 4), (4, 2), (8, 1)
    of_a_size = 8 * 50_000 * 4  # bytes
    monkeypatch.setattr(kept, "_limit", table.nbytes + 3 * of_a_size + 100_000)
    for size in (used, oldest, newer, used, newest):
        for _ in range(3):
            embed(table, size)
    for size in (used, newer, newest):
        assert not is_resampled(table, size)
    assert is_resampled(table, oldest)

    disable()
    monkeypatch.setattr(kept, "_limit", 0)
    assert all(is_resampled(table, size) for size in (newest, newest, newest))


GROWTH = """
import ctypes, os, torch
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.pos_embed import kept

def resident():
    # Without what is free and not yet given back.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def embed(table, n):
    resample_pos_embeds(table, [(n % 60 + 1, n // 60 + 3)], mode="bilinear")

def small(n):
    kept.keep((n,), torch.zeros(8))

def copies_of_tables(n):
    embed(tables[n], 367)

def embeddings(n):
    embed(wide, n)

torch.set_num_threads(1)
tables = torch.randn(1_500, 16, 16, 8)
wide = torch.randn(4, 4, 768)
for fill, times in [(small, 15_000), (copies_of_tables, 1_500), (embeddings, 400)]:
    fill(0)
    kept.clear_all()
    before = resident()
    for n in range(times):
        fill(n)  # is met
        fill(n)
    print((resident() - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="its /proc tells")
def test_a_process_grows_by_the_limit():
    # A new process: here memory that other tests have freed would be used again.
    environment = {**os.environ, "TIMM_NAFLEX_FAST_CACHE_MIB": "10"}
    command = [sys.executable, "-c", GROWTH]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for mib in map(float, run.stdout.split()):
        assert 8 <= mib <= 12


VIEWS = {
    "another shape": lambda table: table.view(2, 8, 4),
    "another dtype": lambda table: table.view(torch.bfloat16),
    "other strides": lambda table: table.transpose(0, 1),
    "the negative bit": torch._neg_view,
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_same_memory_as_other_numbers_is_another_table(view):
    table = torch.randn(4, 4, 4)
    assert [is_resampled(table) for _ in range(3)] == [True, True, False]
    other = VIEWS[view](table)
    for source in (other, other, other, table):
        assert torch.equal(embed(source), embed(source.clone()))


def test_zeros_of_another_sign_are_a_change():
    table = torch.zeros(4, 4, 4)
    assert [is_resampled(table) for _ in range(3)] == [True, True, False]
    table.data.neg_()
    assert is_resampled(table)


def test_what_another_thread_drops_as_it_is_asked_for_is_made_again(monkeypatch):
    class Entries(OrderedDict):
        """Those of a process whose other thread drops all, just before one is taken."""

        def move_to_end(self, key):
            super().move_to_end(key)
            kept.clear_all()

    table = torch.randn(4, 4, 4)
    want = embed(table)
    monkeypatch.setattr(kept, "_entries", Entries())
    for _ in range(4):
        assert torch.equal(embed(table), want)
