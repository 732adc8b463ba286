"""Races on a fake clock, and in processes of their own."""

import os
from functools import partial

import pytest

from timm_naflex_fast.commands.measure import racing


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, but for what is added to its only number."""
    seconds = [0.0]
    monkeypatch.setattr(racing, "now", lambda: seconds[0])
    return seconds


def sides(clock, **seconds):
    """Sides that take so many seconds, and the names of those that ran."""
    ran = []

    def work(name):
        ran.append(name)
        clock[0] += seconds[name]

    def ready(name):
        clock[0] += 1000.0  # does not count
        return partial(work, name)

    return {name: partial(ready, name) for name in seconds}, ran


def test_the_sides_run_in_turns_and_the_first_round_does_not_count(clock):
    both, ran = sides(clock, slow=20.0, fast=0.125)
    found = racing.race(both, rounds=10)
    assert [figures["median_ms"] for figures in found.values()] == [20000, 125]
    assert [figures["rounds"] for figures in found.values()] == [10, 10]
    turns = [*zip(ran[::2], ran[1::2])]
    assert {*turns} == {("slow", "fast"), ("fast", "slow")}  # in either order
    assert len(turns) == 11


def test_each_side_runs_in_new_processes(monkeypatch):
    monkeypatch.setattr(racing, "PROCESSES", 2)
    found = racing.in_new_processes({"a": os.getpid, "b": os.getpid})
    assert len({*found["a"], *found["b"], os.getpid()}) == 5
