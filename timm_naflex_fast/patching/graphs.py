"""Compiled graphs that would not notice what holds now.

Tests: tests/behaviour/test_compiled_choice.py.
"""

import sys

from ..tracing import constant_while_traced

unguarded = False
"""Whether a graph was made that may not ask what holds: see ``note_guard_filter``."""


# The compiler calls this as it reads a call of it, and takes the result.
@constant_while_traced
def note_guard_filter() -> None:
    """Note whether the graph that is being traced may lose the guards on what the user chose.

    A graph is traced anew when its guards fail, and those on our settings fail when other settings
    hold. A filter of guards (``torch.compiler.keep_tensor_guards_unsafe`` and others, an option of
    ``torch.compile`` since torch 2.8) drops some, or all.
    """
    global unguarded
    # The compiler tells its filter to nobody but its own function ``_compile``, in all releases.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_compile":
            hooks = frame.f_locals.get("hooks")
            if getattr(hooks, "guard_filter_fn", None) is not None:
                unguarded = True


def forget_graphs(*, replaced: bool = False) -> None:
    """Let the compiler forget its graphs, if one may not follow what holds since now.

    Not to be called while the lock is held: a compiling thread may wait for it.

    Args:
        replaced: ours took the place of a library's own code. TorchDynamo looks a method up when it
            traces a call, and not again when the graph runs. Graphs with ours follow the settings,
            but for those that ``note_guard_filter`` has noted.
    """
    global unguarded
    # The compiler takes seconds to import; where nobody has imported it, nothing is compiled.
    forget = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if forget is not None and (replaced or unguarded):
        # Before: it waits for who is compiling at present, and who compiles later is noted anew.
        unguarded = False
        forget()
