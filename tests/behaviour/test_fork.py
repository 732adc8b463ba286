"""A process that is forked while a thread chooses goes on: no lock stays taken in it."""

import os
import signal
import sys
import threading
import time

import pytest

from tests.support.oracles import embed, is_pristine, small_vit
from timm_naflex_fast import disable, enable, status

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*fork"),
    pytest.mark.usefixtures("clean"),
]


def enable_in_child():
    status()
    model = small_vit(depth=0)
    with enable("interpolate_cached", model=model):
        embed(model)
        assert status().calls == {("pos_embed", "interpolate_cached"): 1}
    disable()
    assert is_pristine()


def test_twenty_forks_while_a_thread_chooses():
    stop = threading.Event()
    chosen = 0

    def choose():
        nonlocal chosen
        while not stop.is_set():
            with enable("interpolate_cached"):
                status()
            chosen += 1

    enable()
    thread = threading.Thread(target=choose)
    thread.start()
    codes = []
    try:
        for _ in range(20):
            before = chosen
            while chosen == before:  # the thread is at work
                time.sleep(0.001)
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(20)  # ends it if it hangs
                    enable_in_child()
                    os._exit(0)
                finally:
                    sys.stderr.flush()
                    os._exit(3)
            codes.append(os.waitpid(child, 0)[1])
    finally:
        stop.set()
        thread.join()
    assert codes == [0] * 20
