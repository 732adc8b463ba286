"""``naflex-fast run``: a script runs as ``__main__``, as Python itself would run it, with timm patched.

timm is patched the moment the script imports it, not before: what a script sets before its imports (environment
variables, warning filters) counts as it does without us. Processes that ``multiprocessing`` spawns are patched too.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from ..patching.install import enable, status
from ..patching.modes import MODE_VARIABLE, PATCH_EMBED, POS_EMBED, ROPE, Flags, default_mode, parse_flags

TRIGGER = "timm.models.naflexvit"  # the last of timm's modules that is replaced in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``naflex-fast run``; whatever follows the script's name is the script's."""
    modes = ", ".join(POS_EMBED)
    parser.add_argument("--mode", metavar="NAME", help=f"{modes} (default: {MODE_VARIABLE}, else matmul)")
    for flag, valid in (("--pos-embed", POS_EMBED), ("--patch-embed", PATCH_EMBED), ("--rope", ROPE)):
        parser.add_argument(flag, metavar="NAME", help=f"overrides the mode: {', '.join(valid)}")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="runs unchanged")
    rest = parser.add_argument("script_arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own")
    rest.required = False  # before Python 3.12, an error for a missing SCRIPT would ask for ARGS too


def launch(options: argparse.Namespace) -> int:
    """Patch timm and run ``options.script``; what it raises, ``SystemExit`` too, leaves here as from Python itself.

    Returns 0, or 2 after one line on stderr where the options are wrong or there is no such script.
    """
    try:
        mode = options.mode or default_mode()
        flags = parse_flags(mode, pos_embed=options.pos_embed, patch_embed=options.patch_embed, rope=options.rope)
        start = module_runner(options.script) if options.module else script_runner(options.script)
    except (ValueError, OSError) as error:
        unreadable = (
            f"cannot read the script {options.script!r}: {error.strerror}" if isinstance(error, OSError) else error
        )
        print(f"naflex-fast run: {unreadable}", file=sys.stderr)
        return 2
    said = Said()
    patch_on_import(flags, said)
    sys.argv = [options.script, *options.script_arguments]
    try:
        start()
    except SystemExit:
        raise
    except BaseException as error:
        # Shown here without our own frames, then passed on: Python ends as it does after it (by SIGINT on Ctrl-C).
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.excepthook = lambda *_: None
        raise
    finally:
        said.nothing()
    return 0


def script_runner(path: str) -> Callable[[], None]:
    """What runs the file ``path`` as Python runs a script: a new ``__main__``, its folder first on ``sys.path``.

    Raises:
        OSError: no such file, or not to be read.
    """
    with open(path, "rb") as file:
        source = file.read()
    full = os.path.abspath(path)

    def start() -> None:
        main = ModuleType("__main__")
        loader = importlib.machinery.SourceFileLoader("__main__", full)
        vars(main).update(__file__=full, __loader__=loader, __builtins__=builtins, __cached__=None)
        _first_on_path(os.path.dirname(os.path.realpath(path)))
        sys.modules["__main__"] = main
        exec(compile(source, full, "exec", dont_inherit=True), vars(main))

    return start


def module_runner(name: str) -> Callable[[], None]:
    """What runs the module ``name`` as ``python -m`` does; the error for one that does not exist is ``runpy``'s."""

    def start() -> None:
        _first_on_path(os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return start


class Said:
    """The one line on stderr, of the first process of a job (torchrun's rank 0): what is replaced, or that nothing is.

    Pickles as one that has said it already.
    """

    def __init__(self, quiet: bool | None = None) -> None:
        self.done = os.environ.get("RANK", "0") != "0" if quiet is None else quiet

    def replaced(self, flags: Flags) -> None:
        """Say what stands in for timm's code."""
        now = status()
        names = sorted({name.rsplit(".", 1)[0].rsplit(".", 1)[-1] for name in now.replaced})
        what = ", ".join(f"{flag}={strategy}" for flag, strategy in flags.as_dict().items())
        where = f"{len(now.replaced)} functions of {', '.join(names)} replaced" if now.replaced else "nothing replaced"
        self._say(f"{what}; timm {now.timm}, {where}")

    def nothing(self) -> None:
        """Say, unless something was said, that the script never imported timm."""
        self._say("timm was not imported, so nothing was replaced")

    def _say(self, line: str) -> None:
        if not self.done:
            print(f"naflex-fast: {line}", file=sys.stderr, flush=True)
        self.done = True

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return Said, (True,)


@dataclass(frozen=True)
class InChild:
    """Travels to a spawned process among what ``multiprocessing`` prepares it with; patches as it is unpickled."""

    flags: Flags
    said: Said

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Flags, Said]]:
        return patch_on_import, (self.flags, self.said)


def patch_on_import(flags: Flags, said: Said) -> None:
    """``enable`` as soon as timm is imported, in this process and those that it spawns."""

    def patch() -> None:
        enable(flags.pos_embed, patch_embed=flags.patch_embed, rope=flags.rope)
        said.replaced(flags)

    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "timm_naflex_fast": InChild(flags, said)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
    if TRIGGER in sys.modules:
        patch()
    else:
        sys.meta_path.insert(0, AfterImport(TRIGGER, patch))


class AfterImport(MetaPathFinder):
    """Finds nothing of its own; calls ``then()`` once after the module ``name`` was executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The others' spec of the module, its loader told to call ``then``."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance's, which hides the class's
            execute(module)
            self.then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
