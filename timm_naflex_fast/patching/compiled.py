"""Lets the compiler forget the graphs that hold a library's own code where ours is now.

TorchDynamo looks a method up when it traces a call, and not again when the graph runs: a model that
was compiled and run before ``enable()`` would go on with the library's own code. Graphs with ours
need no such thing, because they follow the settings. Nothing here imports the compiler, which takes
seconds: where nobody has imported it, nothing is compiled.
"""

import dis
import sys
from collections.abc import Collection
from types import CodeType
from typing import Any

import torch

from .library import Library, Target
from .others import with_derived

# What it writes down as a graph's conditions is known of this release alone. With any other, all
# graphs are forgotten.
NAMES_METHODS = tuple(int(n) for n in torch.__version__.split(".")[:2]) == (2, 15)


def forget_graphs(library: Library, replaced: Collection[Target]) -> None:
    """Forget all graphs that may hold the library's own code of what was replaced."""
    methods = [target for target in replaced if isinstance(target.owner, type)]
    if not methods:  # of functions the compiler notices a change
        return
    eval_frame = torch._C._dynamo.eval_frame
    for code in _compiled_codes():
        for graph in eval_frame._debug_get_cache_entry_list(code):
            if _may_hold(graph, library, methods):
                eval_frame.reset_code(code)
                break


def _compiled_codes() -> list[CodeType]:
    """What the compiler has seen in this process."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    codes = []
    for tracker in ("input_codes", "output_codes"):
        for reference in list(getattr(getattr(compiler, tracker, None), "seen", ())):
            code = reference()
            if code is not None:
                codes.append(code)
    return codes


def _may_hold(graph: Any, library: Library, methods: Collection[Target]) -> bool:
    """Whether one of these methods was read when the graph was made, and is not called by it.

    The compiler writes down which methods it found on a class, of which class each module was, and
    which files it read: all are conditions of the graph.
    """
    conditions = getattr(getattr(graph, "guard_manager", None), "code_parts", None)
    if not conditions or not NAMES_METHODS:
        return True
    text = "\n".join(conditions)
    if _reads(text, f"{__package__}.{library.name}"):  # ours was in place
        return False
    for owner, name, _ in methods:
        if _calls(graph.code, name):
            continue
        if any(f", {id(cls)})" in text for cls in with_derived(owner)):
            if f"___dict_contains('{name}'," in text:
                return True
        elif _reads(text, owner.__module__):
            # In PyTorch's own containers, and where ``functional_call`` gives other weights, the
            # compiler leaves out the conditions on modules.
            return True
    return False


def _reads(text: str, module: str) -> bool:
    """Whether the conditions of a graph name this Python module."""
    return f"__import_{module.replace('.', '_dot_')}'" in text


def _calls(code: CodeType, name: str) -> bool:
    """Whether the graph breaks at the method: what runs between two graphs looks it up anew."""
    return any(instruction.argval == name for instruction in dis.get_instructions(code))
