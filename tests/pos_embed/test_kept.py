"""What is kept: bounded in bytes, oldest use out first."""

import ctypes
import os
import subprocess
import sys
from collections import OrderedDict
from importlib.util import module_from_spec, spec_from_file_location
from threading import Event, Thread

import pytest
import torch

from tests.support.oracles import finished_tables, kept_tensors
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.pos_embed import kept


def nbytes():
    """The bytes that are counted, which must be those of what is kept, at least."""
    assert kept._nbytes == sum(nbytes for _, nbytes in kept._entries.values())
    assert kept._nbytes >= sum(tensor.nbytes for tensor in kept_tensors())
    for tensor in kept_tensors():  # no part of something larger
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return kept._nbytes


made = []


@kept.kept_by_arguments
def thousand(source, key):
    made.append(key)
    return torch.ones(1000)


def asked(source, *keys):
    """Ask for tensors made of ``source``: the keys of those that were not kept yet."""
    made.clear()
    frozen = kept.frozen((source,), keys)
    if frozen is None:
        return [*keys]
    for key in keys:
        assert torch.equal(thousand(frozen, key), torch.ones(1000))
    return [*made]


def asked_twice(source, *keys):
    """The first call keeps nothing: what it was asked for is made again in the second."""
    assert asked(source, *keys) == [*keys]
    return asked(source, *keys)


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


@pytest.mark.parametrize(
    ("setting", "mib"), [("", 512), ("0", 0), ("64", 64), ("16777216", 16777216)]
)
def test_the_limit_is_that_of_the_environment_or_512_mib(setting, mib, monkeypatch):
    assert imported_again(monkeypatch, setting)._limit == mib * 2**20


def test_all_kinds_together_stay_below_the_limit(monkeypatch):
    monkeypatch.setattr(kept, "_limit", 2 * 2**20)
    table = torch.randn(32, 32, 16)
    held = []
    for n in range(1, 40):
        # Parts of a square, and more.
        square = dict(strategy="interpolate_cached", ar_preserving=True)
        resample_pos_embeds(table, [(n, 20)], mode="bilinear", **square)
        for _ in range(3):
            resample_pos_embeds(table, [(n, 41 - n), (2 * n, 3)], mode="bicubic")
        assert 0 < nbytes() <= 2 * 2**20
        held.append(sum(tensor.nbytes for tensor in kept_tensors()))
    # Most of the count is memory really held.
    assert max(held) > 2**20

    kept.clear_all()
    assert nbytes() == 0


def empty_entries(n):
    sources = torch.zeros(n, 8)
    for k in range(n):
        kept.frozen((sources[k],), ["size"])


def small_tensors(n):
    source = torch.zeros(3)
    kept.frozen((source,), ["size"])
    small = kept.kept_by_arguments(lambda *_: torch.zeros(8))
    for number in range(n):
        small(kept.frozen((source,), ["size"]), ("size", number))


def copies_of_tables(n):
    tables = torch.randn(n // 20, 16, 16, 8)
    for k in range(2 * len(tables)):
        kept.frozen((tables[k // 2],), ["size"])


def embeddings_and_weights(n):
    table = torch.randn(16, 16, 768)
    for k in range(n // 100):
        resample_pos_embeds(table, [(k % 24 + 1, k // 24 + 1)], mode="bilinear")


FILLS = [
    empty_entries,
    small_tensors,
    copies_of_tables,
    embeddings_and_weights,
]


def resident():
    """The memory of this process, without what is free and not yet given back."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counted_and_grown(fill):
    """The bytes that are counted, and those by which a process of its own grows."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)
        fill(400)
        before = resident(), kept._nbytes
        fill(40_000)
        grown = resident() - before[0]
        os.write(writer, f"{kept._nbytes - before[1]} {grown}".encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 100).decode()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc gives back")
def test_the_bytes_that_are_counted_are_those_by_which_the_process_grows():
    # From a new process: here memory that other tests have freed would be used again.
    script = (
        "from tests.resampling.test_kept import FILLS, counted_and_grown\n"
        "for fill in FILLS: print(counted_and_grown(fill))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for fill, line in zip(FILLS, run.stdout.splitlines(), strict=True):
        counted, grown = map(int, line.split())
        assert counted > 10 * 2**20, fill.__name__
        assert abs(counted / grown - 1) <= 0.2, fill.__name__


def test_what_was_not_used_for_the_longest_time_goes_first(monkeypatch):
    first, second, third = torch.zeros(3, 10)
    monkeypatch.setattr(kept, "_limit", 14_000)  # of two tables
    for source in (first, second):
        assert asked_twice(source, "key") == ["key"]
    assert asked(first, "key") == []

    assert asked_twice(third, "key") == ["key"]

    assert asked(first, "key") == []
    assert asked_twice(second, "key") == ["key"]


@pytest.mark.parametrize("change", ["add_", "data"])
def test_what_replaces_an_entry_is_counted_in_its_place(monkeypatch, change):
    table = torch.ones(10)
    keys = [1, 2, 3]
    asked_twice(table, *keys)
    full = nbytes()
    monkeypatch.setattr(kept, "_limit", full)  # exactly what is needed

    if change == "add_":
        table.add_(1)
    else:
        table.data.add_(1)
    assert asked_twice(table, *keys) == keys

    assert nbytes() == full
    assert finished_tables() == 3


def test_an_entry_that_another_thread_drops_as_it_is_asked_for_is_made_again(monkeypatch):
    dropped = []

    class Entries(OrderedDict):
        """Those of a process whose other thread drops each, just before it is taken."""

        def move_to_end(self, key):
            super().move_to_end(key)
            kept._drop(key)
            dropped.append(key)

    monkeypatch.setattr(kept, "_entries", Entries())
    monkeypatch.setattr(kept, "_nbytes", 0)
    made.clear()
    for times in (1, 2, 3):
        assert torch.equal(thousand("source", "key"), torch.ones(1000))
        assert made == ["key"] * times
        assert len(dropped) == times - 1
        assert nbytes() == 1000 * 4 + kept.ENTRY_BYTES + kept.TENSOR_BYTES


def test_what_is_too_large_to_keep_is_returned_all_the_same(monkeypatch):
    monkeypatch.setattr(kept, "_limit", 100)
    assert asked_twice(torch.zeros(10), "key") == ["key"]
    assert nbytes() == 0


@pytest.mark.parametrize("changed", [0, 1])
def test_what_is_kept_is_dropped_when_any_source_changes(changed):
    sources = (torch.zeros(3), torch.zeros(3))
    kept.frozen(sources, ["key"])
    thousand(kept.frozen(sources, ["key"]), "key")
    assert finished_tables() == 1
    sources[changed].add_(1)
    assert kept.frozen(sources, ["key"]) is None
    assert finished_tables() == 0


LAYOUTS = {
    "contiguous": lambda whole: whole[:-1],
    "transposed": lambda whole: whole.transpose(0, 2),
    "offset": lambda whole: whole[1:],
    "last axis of length 1": lambda whole: whole[:1].permute(1, 2, 0),
    "one number": lambda whole: whole[::2, ::2, ::2][:1, :1, :1],
    "expanded": lambda whole: whole[:, :1].expand(-1, 5, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64], ids=str)
def test_a_change_that_moves_no_version_is_seen_in_every_dtype_and_layout(dtype, layout):
    whole = (torch.randn(4, 5, 3) * 9).to(dtype)
    source = layout(whole)
    asked_twice(source, "key")
    assert asked(source, "key") == []
    source.data[-1, -1, -1] += 1
    assert asked(source, "key") == ["key"]


def test_the_same_memory_in_another_shape_or_dtype_is_another_source():
    source = torch.zeros(4, 3)
    asked_twice(source, "key")
    assert asked(source.flatten(), "key") == ["key"]
    assert asked(source.view(torch.int32), "key") == ["key"]


def test_zeros_of_another_sign_are_a_change():
    source = torch.zeros(4)
    asked_twice(source, "key")
    source.data.neg_()
    assert asked(source, "key") == ["key"]


def test_a_fork_while_another_thread_holds_the_lock_leaves_the_child_a_free_one():
    held, done = Event(), Event()

    def hold():
        with kept._lock:
            held.set()
            done.wait(0.2)

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if kept._lock.acquire(timeout=5) else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
