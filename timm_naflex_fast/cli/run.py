"""``naflex-fast run``: Python runs a script, and a library is patched as soon as the script imports
it.

``run`` only starts Python again, with two environment variables. Every Python process inherits
them: ``PYTHONPATH`` begins with the folder ``startup``, whose ``sitecustomize`` Python imports as
it starts, and ``TIMM_NAFLEX_FAST_RUN`` says what to patch. So the script, processes that
``multiprocessing`` spawns, joblib's workers and subprocesses are all prepared in the same way;
forked processes inherit what their parent has. A process that is started with ``python -I``, ``-E``
or ``-S`` reads neither, and is not patched.
"""

import argparse
import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ENV_NAME = "TIMM_NAFLEX_FAST_RUN"
# What a script imports before it can make a model: the last of timm's modules in which something is
# replaced.
HOOKED_MODULES = {
    "timm": "timm.models.naflexvit",
    "transformers": "transformers",
    "torchtitan": "torchtitan",
}
STARTUP = str(Path(__file__).with_name("startup"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``naflex-fast run``; what follows the script's name belongs to the
    script."""
    from ..patching.choices import MODE_VARIABLE, MODES, VALID_MODES

    parser.add_argument(
        "--mode", metavar="NAME", help=f"{', '.join(MODES)} (default: {MODE_VARIABLE}, else matmul)"
    )
    for component, valid in VALID_MODES.items():
        name = f"--{component.replace('_', '-')}"
        parser.add_argument(name, metavar="NAME", help=f"overrides the mode: {', '.join(valid)}")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="an error where the library's own code would run instead",
    )
    several = "what to patch (timm); repeat it for several"
    parser.add_argument("--library", action="append", choices=list(HOOKED_MODULES), help=several)
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, as in python -m",
    )
    what = "what python runs (a file, a folder, a zip, or -) or a command written in Python (torchrun), then its words"
    parser.add_argument("script", metavar="SCRIPT", nargs="A...", help=what)


def run(options: argparse.Namespace) -> int:
    """Start Python on the script, in place of this process where the system can do that.

    Returns the script's exit status on Windows; elsewhere this function does not return.

    Raises:
        ValueError: an unknown mode or strategy, a Python that ignores ``PYTHONPATH``, or a command
            that is no Python.
    """
    from ..patching.choices import MODES, VALID_MODES, check_name, default_mode, parse_settings

    libraries = options.library or ["timm"]
    overrides = {component: getattr(options, component) for component in VALID_MODES}
    flags = parse_settings(options.mode or default_mode(), **overrides, strict=options.strict)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError(
            "python -E, -I and -S ignore what patches the script's processes; leave them out"
        )
    for other in (name for name in libraries if name != "timm"):
        check_name(
            f"mode with {other}", flags.pos_embed, [mode for mode in MODES if mode != "grid_sample"]
        )
    script, *words = options.script
    wanted = json.dumps(
        {"flags": asdict(flags), "libraries": libraries, "prefix": sys.prefix, "first": True}
    )
    path = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, ENV_NAME: wanted, "PYTHONPATH": path}
    before = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W; of -X some names only
    before += [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ]
    before += ["-i"] * sys.flags.interactive + ["-u"] * getattr(
        sys.__stdout__, "write_through", False
    )
    command = [
        sys.executable,
        *before,
        *["-m"] * options.module,
        script if options.module else _find(script),
        *words,
    ]
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    os.execve(sys.executable, command, environment)


def _find(script: str) -> str:
    """The script itself or, where there is no such file, the command of that name that is written
    in Python.

    Raises:
        ValueError: the command is another program.
    """
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    command = None if os.path.exists(script) else shutil.which(script, path=folders)
    if command is None:
        return script
    with open(command, "rb") as file:
        start = file.read(1024)
    # The second: how pip writes a command of a folder whose path is too long for a first line.
    if not re.match(rb"#!.*(python|pypy)|#!/bin/sh\n'+exec' ", start) and not zipfile.is_zipfile(
        command
    ):
        raise ValueError(
            f"{command} is no Python script; valid: naflex-fast run before the Python command in it"
        )
    return command


def prepare_process() -> None:
    """Patch the libraries as soon as this process imports them; at its end say what computed."""
    import wrapt

    wanted = json.loads(os.environ.get(ENV_NAME) or "null")
    if wanted is None:  # somebody removed the variable but kept the folder
        return
    os.environ[ENV_NAME] = json.dumps(
        {**wanted, "first": False}
    )  # for the processes that this one starts
    atexit.register(_report, wanted["libraries"], wanted["first"], os.getpid())
    for library in wanted["libraries"]:
        wrapt.register_post_import_hook(partial(_patch, wanted, library), HOOKED_MODULES[library])


def _patch(wanted: dict[str, Any], library: str, module: Any) -> None:
    try:
        from ..patching.install import enable

        enable(**wanted["flags"], library=library)
    except Exception:
        if sys.prefix == wanted["prefix"]:
            raise  # another environment, which may be too old for us, goes on without


def _report(libraries: list[str], first: bool, process: int) -> None:
    """Say in one line what computed: in the script's first process, and in each below it in which
    something did."""
    if os.getpid() != process or sys.stderr in (
        None,
        sys.stdout,
    ):  # a fork that ends as this process does; nowhere
        return
    calls: dict[tuple[str, str], int] = {}
    if here := [name for name in libraries if HOOKED_MODULES[name] in sys.modules]:
        from ..patching.install import status

        now = status()
        calls = now.calls
        names = ", ".join(
            f"{name} {getattr(sys.modules[name], '__version__', '?')}" for name in here
        )
        ran = (
            ", ".join(f"{step} by {who} {n} times" for (step, who), n in sorted(calls.items()))
            or "none of them"
        )
        said = [
            str(now.flags),
            f"{names}, {len(now.replaced)} functions replaced",
            f"in this process ran {ran}",
        ]
        said += now.why_stock()
    else:
        wanted = " or ".join(HOOKED_MODULES[name] for name in libraries)
        said = [
            f"this process did not import {wanted}; processes that it started are patched if they did"
        ]
    if first or calls:
        rank = os.environ.get("RANK")
        who = f" (rank {rank})" if rank else "" if first else f" (process {process})"
        sys.stderr.write(
            f"naflex-fast{who}: {'; '.join(said)}\n"
        )  # in one piece: other processes write there too
        sys.stderr.flush()
