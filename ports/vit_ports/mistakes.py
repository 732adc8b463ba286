"""Known mistakes: what a tower gives where a line of it is wrong.

The list has right lines of the tower's port in NumPy, and the wrong lines that people write instead.
The port runs with one mistake at a time, from the numbers of the reference. What it gives then is kept
beside the recording, so a port in any language that makes the same mistake has the same numbers.

Tests: ports/tests/test_mistakes.py.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .format import Recording, Stages, Unusable, sampled
from .rule import stages_at
from .towers import Tower

TRIED = 4  # pictures: a base model takes a second for each, and each takes space


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        name: in names of arrays.
        words: what it is.
        start: where the port begins: at the "picture", or at a stage.
        lines: each is a right part of the port's text, and then the lines that stand there instead.
    """

    name: str
    words: str
    start: str
    lines: list[list[str]]


def read_mistakes(file: Path) -> list[Mistake]:
    """The mistakes of a list; SigLIP-2's tells at its head how one is written.

    Raises:
        Unusable: a line is no part of a mistake.
    """
    found: list[Mistake] = []
    start = ""
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        mark = line[:1]
        try:
            if mark == "[":
                start = line[1:-1]
            elif mark == "-":
                found[-1].lines.append([line[2:]])
            elif mark == "+":
                found[-1].lines[-1].append(line[2:])
            elif mark not in ("", "#"):
                name, words = line.split(": ", 1)
                found.append(Mistake(name, words, start, []))
        except (IndexError, ValueError) as problem:
            raise Unusable(
                f"{file}, line {number}: valid: [stage], name: words, - right line, + wrong line"
            ) from problem
    return found


def mistakes_of(tower: Tower, depth: int) -> list[Mistake]:
    """Those of a tower's list, and each of its blocks left out."""
    found = read_mistakes(tower.mistakes)
    right, wrong = tower.block
    for number in range(depth):
        stage = f"block_{number}"
        words = f"block {number} is left out"
        lines = [[right, wrong.format(number)]]
        found.append(Mistake(f"{stage}_left_out", words, stage, lines))
    return found


class Port:
    """The port in NumPy, with the weights of a recording and with a mistake.

    It computes in float32: a base model would take twice as long in float64.
    """

    def __init__(
        self,
        tower: Tower,
        recording: Recording,
        weights: Mapping[str, Any],
        mistake: Mistake | None = None,
    ) -> None:
        """Load the port.

        Args:
            tower: whose port it is.
            recording: tells what the port has to know of pictures and tower.
            weights: those of the recording, under the names that the port reads; arrays, or tensors.
            mistake: which one is made.

        Raises:
            Unusable: a right line of the mistake is not once in the port.
        """
        self.recording = recording
        self.weights = {name: np.asarray(one) for name, one in weights.items()}
        text = tower.port.read_text(encoding="utf-8")
        if mistake:
            text = with_lines(text, mistake)
        # What a wrong line may use.
        self.names: dict[str, Any] = {**tower.names, **recording.about}
        exec(text, self.names)
        filters = self.names["Image"].Resampling
        self.names["FILTER"] = filters[recording.about["filter"].upper()]

    def made(self, start: str, picture: Any, right: Stages) -> Stages:
        """What a picture gives from a stage on.

        Less where it cannot be computed: with a number of heads that does not divide the width, say.

        Args:
            start: the first stage, made of what the reference has before it; or "picture".
            picture: a PIL image in RGB.
            right: the reference's stages.
        """
        about = self.recording.about
        order = list(right)
        made: Stages = {}
        try:
            if start == "picture":
                place = order.index("pixels")
                read_picture = self.names["read_picture"]
                grid, x = read_picture(picture, about["patch_size"], about["max_patches"])
                made["grid"] = np.array(grid, np.int32)
            else:
                place = order.index(start)
                grid = right["grid"].astype(int)
                before = order[place - 1]
                x = right[before].astype(np.float32)
            count = math.prod(grid)
            self.names.update(count=count, given=right)
            step = self.names["step"]
            for stage in order[place:]:
                x = step(stage, x, grid, about, self.recording.table, self.weights)
                x = x.astype(np.float32)
                made[stage] = x
                if stage != "pooled":
                    made[stage] = x[:count]  # without padding
        except (ValueError, LookupError, ArithmeticError):
            pass
        return made


def with_lines(text: str, mistake: Mistake) -> str:
    """The port's text with the wrong lines of a mistake."""
    for right, *wrong in mistake.lines:
        count = text.count(right)
        if count != 1:
            raise Unusable(
                f"{mistake.name}: {right!r} is {count} times in the port; valid: what is there once"
            )
        # The wrong lines are indented as the right one is.
        indent = re.findall(rf"^( *).*{re.escape(right)}", text, re.MULTILINE)[0]
        text = text.replace(right, f"\n{indent}".join(wrong))
    return text


def with_mistakes(
    tower: Tower,
    recording: Recording,
    weights: Mapping[str, Any],
    pictures: Sequence[Any],
    mistakes: Iterable[Mistake],
) -> Recording:
    """A recording with what known mistakes give: one after the other is run on its pictures.

    Its entries tell the pictures that show a mistake. Its arrays are, for the first of these, the
    mistake's numbers at the first stage that shows it and at "pooled". Nothing is kept of a mistake
    that does not show, nor at a stage that the right port itself does not make as the reference
    does: that has another activation, say.

    Args:
        tower: which one was recorded.
        recording: the reference, without mistakes.
        weights: those of the recording, under the names that the port reads.
        pictures: PIL images in RGB, the first ones of the recording or all.
        mistakes: which ones.
    """
    right_port = Port(tower, recording, weights)
    not_ports = []
    for stage in recording.order:
        made = right_port.made(stage, pictures[0], recording.stages[0])
        if first_shown(made, 0, recording) == stage:
            not_ports.append(stage)
    entries = []
    arrays: Stages = {}
    for mistake in mistakes:
        port = Port(tower, recording, weights, mistake)
        # In some pictures the grid shows it, say, and in square ones the pixels.
        shown: dict[str, dict[int, Stages]] = {}
        for number, picture in enumerate(pictures):
            made = port.made(mistake.start, picture, recording.stages[number])
            first = first_shown(made, number, recording)
            if first and first not in not_ports:
                shown.setdefault(first, {})[number] = made
        if not shown:
            continue
        stage = min(shown, key=recording.order.index)
        showing = shown[stage]
        entries.append({**mistake._asdict(), "stage": stage, "pictures": list(showing)})
        # Of a mistake of the picture the pixels, too: many give one grid.
        wanted = {stage, "pixels", "pooled"}
        for number in list(showing)[:TRIED]:
            made = showing[number]
            for name in wanted.intersection(made):
                arrays[f"{mistake.name}/{number:03}.{name}"] = sampled(made[name])
    about = {**recording.about, "mistakes": entries, "mistakes_tried": len(pictures)}
    return replace(recording, about=about, mistakes=arrays)


def first_shown(made: Stages, number: int, recording: Recording) -> str | None:
    """The first stage of a picture that differs from the reference's by more than rounding.

    Where pixels are right within rounding, what follows from them is not looked at: other limits
    are for them.
    """
    port: list[Stages] = [{}] * number
    port.append(made)
    for stage in stages_at("float32", recording, port):
        if stage.row().parting:
            return stage.name
        if stage.name == "pixels":
            return None
    return None
