"""What commands read, print and write: options, progress, files, and where figures come from.

Tests: tests/commands/measure/test_files.py.
"""

import datetime
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def positive(text: str) -> int:
    """An option's whole number; one below 1 is a ValueError, which argparse reports."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def printable(text: object) -> str:
    """Text on one line of a terminal.

    Control characters, line ends and bytes that are no text become escapes.
    """
    characters = []
    for character in str(text):
        if not character.isprintable():
            character = ascii(character)[1:-1]
        characters.append(character)
    return "".join(characters)


def one_line(error: Exception) -> str:
    """What an error says, without long lists, and cut after a word; its kind comes first.

    Of a ValueError or RuntimeError, whose text is a sentence, the kind is left out.
    """
    # Of names in quotes, as torch lists those of tensors, the first three.
    text = re.sub(r'((?:"[^"]+", ){3})(?:"[^"]+"(?:, )?)+', r"\1...", str(error))
    if not isinstance(error, (ValueError, RuntimeError)):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 400, placeholder=" ...")


def require(what: str, *packages: str) -> None:
    """Find out whether what an option needs is installed.

    Raises:
        RuntimeError: it is not; names all that is missing.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise RuntimeError(f"{what} needs {', '.join(missing)}: pip install {' '.join(missing)}")


def progress(what: str, parts: Iterable[Any] | None = None, total: int | None = None) -> Any:
    """The parts of a long work, one after the other, with a tqdm bar on a terminal's stderr.

    Without ``parts`` a bar of ``total`` steps, whose ``update(n)`` tells what is done.
    """
    from tqdm import tqdm

    return tqdm(parts, desc=what, total=total, disable=None)


def marked(text: str) -> str:
    """The marks of a text, ✓ and ✗, as stdout shows them.

    In green and red on a terminal, and as + and x in an encoding that lacks them.
    """
    is_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for mark, plain, colour in (("✓", "+", 32), ("✗", "x", 31)):
        shown = mark
        if is_terminal:
            shown = f"\x1b[{colour}m{mark}\x1b[0m"
        try:
            mark.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            shown = plain
        text = text.replace(mark, shown)
    return text


@contextmanager
def written_whole(file: str | Path) -> Iterator[Path]:
    """A path to write to, in a hidden folder beside ``file``.

    At the end all that lies in that folder goes beside it, and takes the place of what has its name.
    Where something is raised inside, nothing does.

    Raises:
        OSError: the file cannot be written (no such folder, a full disk); what was there stays.
    """
    path = Path(file)
    try:
        # Nothing can take the place of a terminal or a pipe.
        if path.exists() and not path.is_file():
            path.open("ab").close()
            yield path
            return
        path = path.resolve()  # a link stays one
        with TemporaryDirectory(dir=path.parent, prefix=".naflex-fast-") as folder:
            yield Path(folder, path.name)
            for made in Path(folder).iterdir():
                made.replace(path.with_name(made.name))
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{printable(file)} cannot be written: {why}; nothing is changed") from error


def check_writable(file: str | Path) -> None:
    """Find out before the work whether a result can be written; errors as ``written_whole``."""
    with written_whole(file):
        pass


def to_json(record: Mapping[str, Any]) -> str:
    """``record`` as one JSON object; what is no number there (infinity, NaN) is null."""
    # Python writes Infinity and NaN, which no other reader of JSON takes.
    plain = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1) + "\n"


def provenance(command: str) -> dict[str, Any]:
    """What a result file says about its origin; ``command`` is what made the figures."""
    import timm
    import torch

    machine = f"{os.cpu_count()} CPU cores, {_processor()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return {
        "command": printable(command),
        "commit": code_version(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": machine,
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def _processor() -> str:
    """The processor's name and kind."""
    names = [platform.processor()]
    info = Path("/proc/cpuinfo")  # Linux tells more there, of most processors
    if info.exists():
        names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) + names
    return f"{names[0]} ({platform.machine()})"


def code_version() -> str:
    """Which code this is: the release, or in a checkout the commit of HEAD, "+" after edits."""
    from ... import __version__

    # The folder of an installed package can lie in somebody's repository, which does not know it.
    if not _git("log", "-1", "--", "."):
        return f"release {__version__}"
    return _git("describe", "--always", "--exclude=*", "--dirty=+")


def _git(*words: str) -> str:
    """What git says in the package's folder; nothing where it fails, or there is no git."""
    import subprocess  # 5 ms, which --help and --version need not wait

    # The folder of the code, wherever the command was started.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parents[2]), *words]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""
