"""Which code ran: a plugin that silently did nothing would give the library's own results.

``running`` enables a mode for a block, which must run that mode's code. ``ran`` asks it of code
that enables a mode by itself, ``children`` of processes that a test starts. ``nox -f lab/noxfile.py -s forced_stock``
looks whether they notice.
"""

import atexit
import json
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from timm_naflex_fast import enable, status
from timm_naflex_fast.patching.calls import Counts

FOLDER = "NAFLEX_TESTS_CHILDREN"  # the environment variable that tells a child where to write


@contextmanager
def running(mode="matmul", *, component="pos_embed", **options):
    """``enable(mode, **options)``; at the end fail unless the code chosen for ``component`` ran
    inside."""
    with enable(mode, **options) as handle:
        yield handle
        strategy = getattr(handle.flags, component)
        calls = status().calls
        found = strategy == "stock" or (component, strategy) in calls
        assert found, f"{component} by {strategy} never ran; what ran: {calls}"


@contextmanager
def ran(*strategies, component="pos_embed"):
    """Count what runs inside, whoever enables it; fail unless each of ``strategies`` did. Also a
    decorator."""
    seen = Counter()
    original = Counts.record

    @torch.compiler.assume_constant_result  # as the function that it wraps
    def record(counts, component, strategy, *reason):
        seen[component, strategy] += 1
        original(counts, component, strategy, *reason)

    with mock.patch.object(Counts, "record", record):
        yield seen
    missing = [name for name in strategies if not seen[component, name]]
    assert not missing, f"{component} by {', '.join(missing)} never ran; what ran: {dict(seen)}"


@contextmanager
def children(folder):
    """Processes that start inside write into ``folder`` what ran in them.

    What it gives returns that, one Counter for each process that ended by itself and enabled this
    package. ``multiprocessing`` ends its processes otherwise: they have to send ``status().calls``.
    """
    path = filter(None, [str(Path(__file__).with_name("child")), os.environ.get("PYTHONPATH")])

    def ran_there():
        return [
            Counter(dict((tuple(key), n) for key, n in json.loads(f.read_text())))
            for f in folder.iterdir()
        ]

    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(path), FOLDER: str(folder)}):
        yield ran_there


def watch_a_child():
    """Write down at the end of this process what ran in it."""
    global _watching
    _watching = ran()  # kept: it would end with its last reference
    seen = _watching.__enter__()
    path = Path(os.environ[FOLDER], f"{os.getpid()}.json")
    atexit.register(lambda: path.write_text(json.dumps([*seen.items()])))
