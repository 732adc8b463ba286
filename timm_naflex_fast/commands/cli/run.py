"""``naflex-fast run``: a script runs unchanged, and a library is patched as it is imported.

``run`` only starts the script, with two environment variables. Every Python process inherits
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
import shutil
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ...names import MODES, check_name

ENV_NAME = "TIMM_NAFLEX_FAST_RUN"
# What a script imports before it can make a model. After this import all is there that we replace.
HOOKED_MODULES = {
    "timm": "timm.models.naflexvit",
    "transformers": "transformers",
}
STARTUP = str(Path(__file__).with_name("startup"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``naflex-fast run``; what follows the script's name is the script's."""
    parser.add_argument(
        "--mode", metavar="NAME", default="matmul", help=f"of {' '.join(MODES)} (matmul)"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="an error where the library's own code would run instead",
    )
    parser.add_argument(
        "--library",
        action="append",
        choices=HOOKED_MODULES,
        help="what to patch (timm); repeat it for several",
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs=argparse.PARSER,
        help="what python runs (a file, a folder, a zip, or -) or a command (torchrun; python, for "
        "python -m), then its words",
    )


def action(options: argparse.Namespace) -> NoReturn:
    """Start the script in place of this process: this function does not return.

    Raises:
        ValueError: no such mode, or one that a library does not have, or no such script.
    """
    libraries = options.library or ["timm"]
    valid = list(MODES)
    if "transformers" in libraries:
        valid.remove("grid_sample")
    # What a library does not have is told here, once, and not in each of the script's processes.
    flags = dict(mode=check_name("--mode", options.mode, valid), strict=options.strict)
    script, *words = options.script
    start = _start_of(script)
    # A command may be a launcher, as torchrun, which has nothing to say of itself.
    speaks = start[0] == sys.executable
    wanted = json.dumps(dict(flags=flags, libraries=libraries, first=True, speaks=speaks))
    folders = filter(None, [STARTUP, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, ENV_NAME: wanted, "PYTHONPATH": os.pathsep.join(folders)}
    command = [*start, *words]
    # The script takes this process's place: signals and the exit status are its own.
    os.execve(command[0], command, environment)


def _start_of(script: str) -> list[str]:
    """The words that start a file in Python or, where there is no such file, a command.

    Raises:
        ValueError: there is neither.
    """
    # A file comes first, as for python; "torchrun" is a command unless there is such a file.
    if script == "-" or os.path.exists(script):
        return [sys.executable, script]
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    command = shutil.which(script, path=folders)
    if command is None:
        raise ValueError(f"there is no file {script}, and no command of that name")
    return [command]


def prepare_process() -> None:
    """Patch the libraries as soon as this process imports them; at its end say what computed."""
    import wrapt

    wanted = json.loads(os.environ[ENV_NAME])
    # For the processes that this one starts.
    os.environ[ENV_NAME] = json.dumps({**wanted, "first": False, "speaks": False})
    atexit.register(_report, wanted)
    for library in wanted["libraries"]:
        wrapt.register_post_import_hook(partial(_patch, wanted, library), HOOKED_MODULES[library])


def _patch(wanted: dict[str, Any], library: str, module: Any) -> None:
    # Only now, when the script has imported the library itself: one that is not used costs nothing.
    from ...patching.install import enable

    enable(**wanted["flags"], library=library)


def _report(wanted: dict[str, Any]) -> None:
    """Say in one line what computed.

    In the script, and in each process below it in which something did.
    """
    names = [HOOKED_MODULES[library] for library in wanted["libraries"]]
    ran = []
    said = [f"this process did not import {' or '.join(names)}, so nothing was patched in it"]
    if any(name in sys.modules for name in names):
        from ...patching.status import in_words, status

        now = status()
        calls = sorted(now.calls.items())
        ran = [f"{step} by {mode} {times} times" for (step, mode), times in calls]
        in_this = f"in this process ran {', '.join(ran) or 'none of them'}"
        said = [in_words(now.flags), in_this, *now.why_stock()]
    if wanted["speaks"] or ran:
        who = f"process {os.getpid()}, rank {os.environ.get('RANK', 0)}"
        # In one piece: other processes write there too.
        sys.stderr.write(f"naflex-fast ({who}): {'; '.join(said)}\n")
