"""What is kept: bounded in bytes, oldest use out first, told by bits, and freed by ``disable()``."""

import os
import subprocess
import sys
from collections import OrderedDict
from importlib.util import module_from_spec, spec_from_file_location
from threading import Event, Thread

import pytest
import torch

from timm_naflex_fast import disable
from timm_naflex_fast.pos_embed import kept

MIB = 2**20


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


@pytest.mark.parametrize(("setting", "mib"), [("", 512), ("64", 64), ("16777216", 16777216)])
def test_the_limit_is_that_of_the_environment_or_512_mib(setting, mib, monkeypatch):
    again = imported_again(monkeypatch, setting)
    number = torch.zeros(1, dtype=torch.uint8)
    for nbytes, is_kept in [(mib * MIB - 1000, True), (mib * MIB, False)]:
        again.keep(("key",), number.expand(nbytes))
        assert (again.use(("key",)) is not None) == is_kept


def test_nothing_is_kept_where_the_limit_is_0(monkeypatch):
    again = imported_again(monkeypatch, "0")
    again.keep(("key",), torch.zeros(1))
    assert again.use(("key",)) is None


def test_over_the_limit_what_was_not_used_for_the_longest_time_goes_first(monkeypatch):
    again = imported_again(monkeypatch, "1")
    tenth = torch.zeros(25_000)  # of the limit; the second call replaces the first's
    for _ in range(2):
        again.keep(("used",), tenth)
        for n in range(40):
            assert again.use(("used",)) is tenth
            again.keep((n,), (tenth,))
        left = [n for n in range(40) if again.use((n,))]
        assert left == [*range(31, 40)]

    again.clear_all()
    assert again.use(("used",)) is None
    assert not any(again.use((n,)) for n in range(40))


GROWTH = """
import ctypes, os, torch
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.pos_embed import kept

def resident():
    # Without what is free and not yet given back.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def small(n):
    kept.keep((n,), torch.zeros(8))

def copies_of_tables(n):
    kept.frozen((tables[n // 2],), ["size"])

def embeddings(n):
    n = n // 2  # each twice
    resample_pos_embeds(wide, [(n % 24 + 1, n // 24 + 1)], mode="bilinear")

torch.set_num_threads(1)
tables = torch.randn(1_500, 16, 16, 8)
wide = torch.randn(16, 16, 768)
for fill, times in [(small, 15_000), (copies_of_tables, 3_000), (embeddings, 400)]:
    embeddings(0)
    kept.clear_all()
    before = resident()
    for n in range(times):
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


def is_known(source, size=(3, 4)):
    """Whether a source is known by its bits, after this or a later call with this size."""
    return kept.frozen((source,), [size]) is not None


def test_the_second_call_with_a_size_knows_the_source():
    source = torch.zeros(4)
    assert [is_known(source) for _ in range(3)] == [False, True, True]
    # Others come later: they are met once more.
    other = torch.zeros(4)
    assert [is_known(other, size) for size in [(3, 4), (5, 5), (5, 5)]] == [False, False, True]


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
    assert [is_known(source), is_known(source)] == [False, True]
    source.data[-1, -1, -1] += 1
    assert not is_known(source)


VIEWS = {
    "another shape": torch.flatten,
    "another dtype": lambda square: square.view(torch.int32),
    "other strides": torch.t,
    "the negative bit": torch._neg_view,
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_same_memory_as_other_numbers_is_another_source(view):
    square = torch.randn(4, 4)
    first = [kept.frozen((square,), ["size"]) for _ in range(2)]
    other = VIEWS[view](square)
    second = [kept.frozen((other,), ["size"]) for _ in range(2)]
    assert first[0] is second[0] is None
    for known, source in ((first[1], square), (second[1], other)):
        assert torch.equal(known.tensors[0], source)


def test_zeros_of_another_sign_are_a_change():
    source = torch.zeros(4)
    assert [is_known(source), is_known(source)] == [False, True]
    source.data.neg_()
    assert not is_known(source)


@pytest.mark.parametrize("changed", [0, 1])
def test_what_is_made_of_sources_is_dropped_when_any_of_them_changes(changed):
    sources = (torch.zeros(3), torch.zeros(3))
    kept.frozen(sources, ["size"])
    known = kept.frozen(sources, ["size"])
    kept.keep(("made", known), torch.zeros(3))
    assert kept.use(("made", known)) is not None
    sources[changed].add_(1)
    assert kept.frozen(sources, ["size"]) is None
    assert kept.use(("made", known)) is None


@torch.inference_mode()
def test_what_is_made_in_inference_mode_may_be_used_in_training():
    source = torch.zeros(3)
    kept.frozen((source,), ["size"])
    assert not kept.frozen((source,), ["size"]).tensors[0].is_inference()
    assert not kept.kept_by_arguments(torch.zeros)(3).is_inference()


def test_disable_frees_what_is_kept():
    kept.keep(("key",), torch.zeros(3))
    disable()
    assert kept.use(("key",)) is None


def test_what_another_thread_drops_as_it_is_asked_for_is_made_again(monkeypatch):
    made = []

    class Entries(OrderedDict):
        """Those of a process whose other thread drops all, just before one is taken."""

        def move_to_end(self, key):
            super().move_to_end(key)
            kept.clear_all()

    @kept.kept_by_arguments
    def number(argument):
        made.append(argument)
        return torch.ones(1)

    monkeypatch.setattr(kept, "_entries", Entries())
    for _ in range(3):
        assert number("argument") == 1
    assert made == ["argument"] * 3


def test_a_fork_while_another_thread_holds_the_lock_leaves_the_child_a_free_one():
    held, done = Event(), Event()

    class Key:
        def __hash__(self):  # asked for with the lock held
            held.set()
            done.wait(0.2)
            return 1

    thread = Thread(target=kept.keep, args=((Key(),), torch.zeros(1)))
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        thread = Thread(target=kept.clear_all, daemon=True)
        thread.start()
        thread.join(5)
        os._exit(thread.is_alive())
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
