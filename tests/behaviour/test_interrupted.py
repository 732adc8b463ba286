"""Ctrl-C at any line of enable, disable, restore and with: timm can be put back, and runs."""

import itertools
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.checks import during, slow
from tests.support.oracles import embed, is_pristine, small_vit
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import install


class CtrlC:
    """Raises KeyboardInterrupt before the n-th line of this package's patching that runs inside; a loop's first turns.

    Not where Python leaves ``with _lock``: there it looks at no signals, and tracing alone can interrupt it.
    """

    def __init__(self, line):
        self.left, self.entered, self.turns = line, set(), Counter()

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            here, line = (id(frame), frame.f_lineno), (frame.f_code, frame.f_lineno)
            leaves_lock = here in self.entered and frame.f_code.co_filename == install.__file__ and line[1] in LOCKED
            self.entered.add(here)
            self.turns[line] += not leaves_lock
            if not leaves_lock and self.turns[line] <= 2:
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self.trace


FOLDER = str(Path(install.__file__).parent)
LOCKED = {n for n, line in enumerate(Path(install.__file__).read_text().splitlines(), 1) if "with _lock:" in line}


def switch_everything(model):
    with enable("grid_sample"):
        pass
    enable("grid_sample")
    with enable("matmul", model=model):
        enable("interpolate_cached").restore()
    disable(model)
    disable()


@pytest.mark.parametrize("stride", [slow(1), 19])
def test_an_interrupt_at_any_line_leaves_timm_removable(stride):
    model = small_vit(depth=0)
    switch_everything(model)
    want = embed(model)
    for lines in itertools.count(stride, stride):
        stop = CtrlC(lines)
        with suppress(KeyboardInterrupt), during(sys.settrace, stop.trace, after=None):
            switch_everything(model)
        if stop.left > 0:
            break
        out = embed(model)  # neither an endless recursion nor anything half-done
        status()
        if lines % 2:  # by disable alone, or by another enable first
            enable("matmul", model=model)
            assert torch.allclose(embed(model), want, atol=1e-5)
            assert status().calls == {("pos_embed", "matmul"): 1}
        disable()
        assert is_pristine() and torch.equal(embed(model), want) and out.shape == want.shape, lines
        assert status().models == () and status().replaced == {}
    assert lines > 100


@pytest.mark.parametrize("stride", [slow(1), 29])
@pytest.mark.parametrize("where", ["enable", "restore"])
def test_an_interrupted_switch_can_be_repeated(where, stride):
    model = small_vit(depth=0)
    want, interrupted = embed(model), 0
    for line in range(1, 400, stride):
        stop, handle = CtrlC(line), enable("grid_sample", model=model) if where == "restore" else None
        with suppress(KeyboardInterrupt), during(sys.settrace, stop.trace, after=None):
            if handle:
                handle.restore()
            else:
                handle = enable("grid_sample", model=model)
        interrupted += stop.left == 0
        if handle is None:
            handle = enable("grid_sample", model=model)
            assert not torch.allclose(embed(model), want, atol=1e-4)
            assert status().calls == {("pos_embed", "grid_sample"): 1}
        handle.restore()
        if where == "enable":
            disable()  # what the interrupted call had chosen is what the second one restores
        assert is_pristine() and torch.equal(embed(model), want), line
    assert interrupted > 1
