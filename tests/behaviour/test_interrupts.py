"""Ctrl-C at any line of ``enable``, of leaving its handle, or of ``disable``."""

import linecache
import sys

import pytest

from tests.support.oracles import is_pristine, small_vit, uses
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import choices, install

pytestmark = pytest.mark.usefixtures("clean")
FILES = (install.__file__, choices.__file__)


class Interrupt:
    """Notes each line of ours that runs inside, and raises before one of them, by its number."""

    def __init__(self, at=None):
        self.at = at
        self.lines = []

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
            self.lines.append((frame.f_code, frame.f_lineno))
        return self.trace

    def first_and_last(self):
        """The numbers at which each line ran for the first and for the last time.

        A ``with`` is a line at its end, too, where Python itself lets no interrupt in.
        """
        last = {}
        for number, (code, line) in enumerate(self.lines):
            is_with = linecache.getline(code.co_filename, line).lstrip().startswith("with ")
            if not is_with:
                last[code, line] = number
        return sorted({*last.values(), *map(self.lines.index, last)})


@pytest.mark.parametrize(
    ("verb", "of_model"),
    [
        (lambda model, handle: enable("matmul"), False),
        (lambda model, handle: enable("matmul", model=model), True),
        (lambda model, handle: handle.restore(), False),
        (lambda model, handle: handle.restore(), True),
        (lambda model, handle: disable(), False),
        (lambda model, handle: disable(model), True),
    ],
)
@pytest.mark.parametrize("before", [None, "grid_sample"])
def test_what_is_interrupted_is_done_or_not_and_disable_ends_it(verb, of_model, before):
    model = small_vit(depth=0)

    def chosen():
        if before:
            enable(before)
        return enable("interpolate_cached", model=model if of_model else None)

    handle = chosen()
    with Interrupt() as watched:
        verb(model, handle)
    allowed = {"interpolate_cached", uses(model)}
    disable()
    for number in watched.first_and_last():
        handle = chosen()
        with pytest.raises(KeyboardInterrupt), Interrupt(number):
            verb(model, handle)
        assert uses(model) in allowed, watched.lines[number]
        disable()
        assert is_pristine(), watched.lines[number]
        assert not status().replaced
