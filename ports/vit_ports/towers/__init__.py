"""The image towers that are known: a folder for each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Tower(NamedTuple):
    """What is known of a tower beside its recordings.

    Attributes:
        port: the file of its port in NumPy.
        mistakes: the file of that port's right lines, and the wrong lines that people write instead.
        block: of the port, the line that makes a block, and the line that leaves block {} out.
        names: what the wrong lines call, beside what the port has itself.
        float32_limits: of a stage what float32 may move it by, in each of its measures (see
            ``rule.Stage.differences``).
    """

    port: Path
    mistakes: Path
    block: tuple[str, str]
    names: Mapping[str, Any]
    float32_limits: Callable[[str], dict[str, float]]
