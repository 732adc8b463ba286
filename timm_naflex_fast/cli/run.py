"""``naflex-fast run``: Python runs a script, and a library is patched as soon as the script imports it.

``run`` only starts Python again, with two environment variables. Every Python process inherits them: ``PYTHONPATH``
begins with the folder ``startup``, whose ``sitecustomize`` Python imports as it starts, and ``TIMM_NAFLEX_FAST_RUN``
says what to patch. So the script, processes that ``multiprocessing`` spawns, joblib's workers and subprocesses are all
prepared in the same way; forked processes inherit what their parent has. A process that is started with ``python -I``,
``-E`` or ``-S`` reads neither, and is not patched.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


VARIABLE = "TIMM_NAFLEX_FAST_RUN"
# What a script imports before it can make a model: the last of timm's modules in which something is replaced.
TRIGGERS = {"timm": "timm.models.naflexvit", "transformers": "transformers", "torchtitan": "torchtitan"}
STARTUP = str(Path(__file__).with_name("startup"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``naflex-fast run``; what follows the script's name belongs to the script."""
    from ..patching.settings import MODE_VARIABLE, MODES, VALID_MODES

    parser.add_argument("--mode", metavar="NAME", help=f"{', '.join(MODES)} (default: {MODE_VARIABLE}, else matmul)")
    for flag, valid in VALID_MODES.items():
        name = f"--{flag.replace('_', '-')}"
        parser.add_argument(name, metavar="NAME", help=f"overrides the mode: {', '.join(valid)}")
    several = "what to patch (timm); repeat it for several"
    parser.add_argument("--library", action="append", choices=list(TRIGGERS), help=several)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    what = "what python runs (a file, a folder, a zip, or -), then its words"
    parser.add_argument("script", metavar="SCRIPT", nargs="A...", help=what)


def run(options: argparse.Namespace) -> int:
    """Start Python on the script, in place of this process where the system can do that.

    Returns the script's exit status on Windows; elsewhere this function does not return.

    Raises:
        ValueError: an unknown mode or strategy, or a Python that ignores ``PYTHONPATH``.
    """
    from ..patching.settings import VALID_MODES, default_mode, parse_settings

    libraries = options.library or ["timm"]
    flags = parse_settings(options.mode or default_mode(), **{flag: getattr(options, flag) for flag in VALID_MODES})
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("python -E, -I and -S ignore what patches the script's processes; leave them out")
    if flags.pos_embed == "grid_sample" and (others := [name for name in libraries if name != "timm"]):
        valid = "'stock', 'interpolate_cached', 'matmul'"
        raise ValueError(f"'grid_sample' is not valid with {others[0]}; valid: {valid}")
    if os.pathsep in STARTUP:
        raise ValueError(f"PYTHONPATH cannot hold {STARTUP}, where this package lies: {os.pathsep!r} parts its folders")
    order = json.dumps({"flags": asdict(flags), "libraries": libraries, "first": True})
    path = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, VARIABLE: order, "PYTHONPATH": path}
    own = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W, -X as given to this process
    if sys.flags.interactive:
        own.append("-i")
    if getattr(sys.__stdout__, "write_through", False):
        own.append("-u")
    command = [sys.executable, *own, *["-m"] * options.module, *options.script]
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    if sys.stdout is not None:
        sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def prepare_process() -> None:
    """Patch the libraries as soon as this process imports them; the script's first process reports at its end."""
    import wrapt

    order = json.loads(os.environ.get(VARIABLE) or "null")
    if order is None:  # somebody removed the variable but kept the folder
        return
    if order["first"]:
        os.environ[VARIABLE] = json.dumps({**order, "first": False})  # for the processes that this one starts
        if os.environ.get("RANK", "0") == "0":  # torchrun starts one first process per rank
            atexit.register(partial(_report, order["libraries"]), os.getpid())
    for library in order["libraries"]:
        wrapt.register_post_import_hook(partial(_patch, order["flags"], library), TRIGGERS[library])


def _patch(flags: dict[str, Any], library: str, module: Any) -> None:
    from ..patching.install import enable

    enable(**flags, library=library)


def _report(libraries: list[str], process: int) -> None:
    if os.getpid() == process:  # not a fork that ends as this process does
        print(f"naflex-fast: {_outcome(libraries)}", file=sys.stderr, flush=True)


def _outcome(libraries: list[str]) -> str:
    here = [name for name in libraries if name in sys.modules]
    names = ", ".join(f"{name} {getattr(sys.modules[name], '__version__', '?')}" for name in here)
    if not here:
        names = " or ".join(libraries)
        return f"this process did not import {names}; processes that it started are patched if they did"
    if not any(TRIGGERS[name] in sys.modules for name in here):
        return f"nothing is replaced: {names} was imported, but not its {' and '.join(TRIGGERS[name] for name in here)}"
    from ..patching.install import status

    now = status()
    what = ", ".join(f"{flag}={strategy}" for flag, strategy in asdict(now.flags).items())
    if not now.replaced:
        return f"{what}: nothing is replaced in {names}"
    ran = ", ".join(f"{step} by {who} {n} times" for (step, who), n in sorted(now.calls.items())) or "none of them"
    functions = f"{names}, {len(now.replaced)} functions replaced"
    return "; ".join([f"{what}; {functions}; in this process ran {ran}", *now.why_stock()])
