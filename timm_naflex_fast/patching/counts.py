"""What has run since an ``enable()``: how often, and why the library's own code did.

The counting function has a file of its own, which compiles nothing: the compiler of torch 2.4 puts
the result of such a function (None) in place of the global of its name, in the file whose function
it compiles.

Tests: tests/patching/test_status.py.
"""

import sys
import warnings
from types import FrameType

from ..tracing import constant_while_traced
from .choices import Counts

call_counts = Counts()
"""What counts at present: the counters of the newest ``enable()``."""


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard
# on the counts.
@constant_while_traced
def record_call(component: str, strategy: str, reason: str, library: str) -> None:
    """Count one call for ``status()``; at the first that the library's own code has to do, warn."""
    call_counts.calls[component, strategy] += 1
    if reason:
        call_counts.fallbacks[reason] += 1
        if call_counts.fallbacks[reason] == 1:
            warn(f"{reason} stays with {library}'s own code")


def warn(message: str) -> None:
    """Warn of something, at the line of the user's that led to it.

    That is the innermost that lies in none of the libraries: between it and this one are frames of
    PyTorch's and of the model's, more or less of them by method and release.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
        if package not in LIBRARIES:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(f"timm_naflex_fast: {message}", stacklevel=level)


LIBRARIES = ("timm_naflex_fast", "timm", "transformers", "accelerate", "torch")
