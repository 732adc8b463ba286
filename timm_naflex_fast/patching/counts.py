"""What has run since an ``enable()``: how often, and why the library's own code did.

The counting function has a file of its own, which compiles nothing: the compiler of torch 2.4 puts
the result of such a function (None) in place of the global of its name, in the file whose function
it compiles.

Tests: tests/patching/test_status.py.
"""

import warnings

from ..tracing import constant_while_traced
from .choices import Counts

call_counts = Counts()
"""What counts at present: the counters of the newest ``enable()``."""


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard
# on the counts.
@constant_while_traced
def record_call(component: str, strategy: str, reason: str | None, library: str) -> None:
    """Count one call for ``status()``; at the first that the library's own code has to do, warn."""
    call_counts.calls[component, strategy] += 1
    if reason is not None:
        call_counts.fallbacks[reason] += 1
        if call_counts.fallbacks[reason] == 1:
            message = f"timm_naflex_fast: {reason} stays with {library}'s own code"
            # About the caller of the model's method: the library's file and this one lie between.
            warnings.warn(message, stacklevel=6)
