"""Who begins or ends what holds, or writes what is kept, is alone; and may do so within itself.

Threads would meet at a barrier inside, if one more could come in: it waits in vain.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError, Event, Thread

import pytest
import torch

from tests.support.oracles import is_pristine
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import choices
from timm_naflex_fast.pos_embed import kept

pytestmark = pytest.mark.usefixtures("clean")


class Key:
    """A key that calls ``inside()`` whenever it is looked up."""

    inside = staticmethod(lambda: None)

    def __hash__(self):
        self.inside()
        return 1


@pytest.fixture
def come_inside(monkeypatch):
    """Let what is called inside both locks call a function first."""

    def come_inside(inside):
        holding = choices.holding
        monkeypatch.setattr(choices, "holding", lambda: (inside(), holding())[1])
        monkeypatch.setattr(Key, "inside", staticmethod(inside))

    return come_inside


@pytest.fixture
def steps():
    """What takes a lock, by name."""
    kept.keep((Key(),), torch.zeros(9))
    handles = [enable(), enable()]
    return {
        "enable": enable,
        "restore": lambda: handles.pop().restore(),
        "disable": disable,
        "status": status,
        "keep": lambda: kept.keep((Key(),), torch.zeros(9)),
        "clear_all": kept.clear_all,
    }


@pytest.mark.parametrize(
    "names",
    [
        ("enable", "enable"),
        ("restore", "enable"),
        ("disable", "enable"),
        ("status", "enable"),
        ("keep", "keep"),
        ("clear_all", "keep"),
    ],
)
def test_two_threads_are_not_inside_at_once(names, steps, come_inside):
    barrier = Barrier(2)
    met = []

    def meet():
        try:
            barrier.wait(0.2)
        except BrokenBarrierError:  # nobody else came in
            return
        met.append(names)

    come_inside(meet)
    with ThreadPoolExecutor(2) as threads:
        for running in [threads.submit(steps[name]) for name in names]:
            running.result()
    assert barrier.broken
    assert not met


@contextmanager
def at_most_five_seconds():
    def end(*_):
        raise TimeoutError("it waits for itself")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm")
@pytest.mark.parametrize(("name", "within"), [("enable", "status"), ("keep", "clear_all")])
def test_a_signal_handler_may_do_inside_what_it_likes(name, within, steps, come_inside):
    done = []

    def handle():
        if not done:
            done.append(within)
            steps[within]()

    come_inside(handle)
    with at_most_five_seconds():
        steps[name]()
    assert done
    disable()
    assert is_pristine()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("name", ["enable", "disable", "keep"])
def test_a_fork_while_another_thread_is_inside_leaves_the_child_free_locks(
    name, steps, come_inside
):
    held = Event()
    done = Event()

    def stay():
        held.set()
        done.wait(0.2)

    come_inside(stay)
    thread = Thread(target=steps[name])
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends it if it waits
        try:
            done.set()
            steps["enable"]()
            steps["disable"]()
            steps["keep"]()
            os._exit(0 if is_pristine() else 1)
        finally:
            os._exit(2)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
