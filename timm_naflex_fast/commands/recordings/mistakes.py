"""Known mistakes: what SigLIP-2's image tower gives where a line of it is wrong.

``mistakes.diff`` is the list: right lines of the port in NumPy (``examples/port_in_numpy.py``), and
the wrong lines that people write instead. The port runs with one mistake at a time, from the numbers
of the reference. What it gives then is kept beside the recording, so a port in any language that
makes the same mistake has the same numbers.

Tests: tests/commands/recordings/test_mistakes.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import wrong_lines
from .format import Array, Recording, Stages, Unusable, float32_limits, sampled
from .rule import Stage

LIST = Path(__file__).with_name("mistakes.diff")
NAME = "port_in_numpy.py"
PLACES = (
    Path(__file__).with_name(NAME),  # in an installed package
    Path(__file__).parents[3] / "examples" / NAME,
)
MOST = 4  # pictures of which a mistake's numbers are kept


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


def read_mistakes(file: Path = LIST) -> list[Mistake]:
    """The mistakes of a list; ``mistakes.diff`` tells at its head how one is written.

    Raises:
        Unusable: a line is no part of a mistake.
    """
    found: list[Mistake] = []
    start = ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        mark, text = line[:1], line[2:]
        try:
            if mark in ("", "#"):
                continue
            if mark == "[":
                start = line[1:-1]
            elif mark == "-":
                found[-1].lines.append([text])
            elif mark == "+":
                found[-1].lines[-1].append(text)
            else:
                name, words = line.split(": ", 1)
                found.append(Mistake(name, words, start, []))
        except (IndexError, ValueError) as problem:
            raise Unusable(
                f"{file}, line {number}: valid: [stage], name: words, - right line, + wrong line"
            ) from problem
    return found


def mistakes_of(depth: int, more: Path | None = None) -> list[Mistake]:
    """Those of the list, and each block of a tower left out; and those of another list."""
    found = read_mistakes()
    for number in range(depth):
        lines = [["return block(", f"return x if number == {number} else block("]]
        stage = f"block_{number}"
        found.append(Mistake(f"{stage}_left_out", f"block {number} is left out", stage, lines))
    if more is not None:
        found += read_mistakes(more)
    return found


class Port:
    """The port in NumPy, with the weights of a recording and with a mistake.

    It computes in float32: a base model would take twice as long in float64.
    """

    def __init__(
        self, recording: Recording, weights: Mapping[str, Array], mistake: Mistake | None = None
    ) -> None:
        """Load the port.

        Args:
            recording: tells what the port has to know of pictures and tower.
            weights: those of the recording, under transformers' names.
            mistake: which one is made.

        Raises:
            Unusable: a right line of the mistake is not once in the port.
        """
        self.about = recording.about
        self.table = recording.table
        self.weights = weights
        text = next(file for file in PLACES if file.is_file()).read_text(encoding="utf-8")
        if mistake:
            text = with_lines(text, mistake)
        # What a wrong line may use.
        self.names: dict[str, Any] = {**vars(wrong_lines), **self.about, "__name__": NAME}
        exec(compile(text, NAME, "exec"), self.names)
        self.names["FILTER"] = self.names["Image"].Resampling[self.about["filter"].upper()]

    def made(self, start: str, picture: Any, right: Stages, wanted: Sequence[str]) -> Stages:
        """What a picture gives from a stage on, as far as ``wanted``.

        Less where it cannot be computed: with a number of heads that does not divide the width, say.

        Args:
            start: the first stage, made of what the reference has before it; or "picture".
            picture: a PIL image in RGB.
            right: the reference's stages.
            wanted: the stages that are made; what follows another one is not.
        """
        order = ["picture", *right]
        grid, x = right["grid"], right.get(order[order.index(start) - 1])
        made: Stages = {}
        try:
            if start == "picture":
                sides = self.about["patch_size"], self.about["max_patches"]
                grid, x = self.names["read_picture"](picture, *sides)
                made["grid"] = np.array(grid, np.int32)
                start = "pixels"
            count = int(np.prod(grid))
            self.names.update(count=count, given=right)
            for stage in order[order.index(start) :]:
                if stage not in wanted:
                    break
                x = self.names["step"](stage, x, grid, self.about, self.table, self.weights)
                x = x.astype(np.float32)
                made[stage] = x if stage == "pooled" else x[:count]  # without padding
        except (ValueError, IndexError, KeyError, ZeroDivisionError):
            pass
        return made


def with_lines(text: str, mistake: Mistake) -> str:
    """The port's text with the wrong lines of a mistake."""
    for right, *wrong in mistake.lines:
        start, *rest = text.split(right)
        if len(rest) != 1:
            raise Unusable(
                f"{mistake.name}: {right!r} is {len(rest)} times in {NAME}; valid: what is there once"
            )
        line = start.rpartition("\n")[2]
        indented = "\n" + line[: len(line) - len(line.lstrip())]
        text = start + indented.join(wrong) + rest[0]
    return text


def known_mistakes(
    recording: Recording,
    weights: Mapping[str, Array],
    pictures: Sequence[Any],
    mistakes: Iterable[Mistake],
) -> tuple[list[dict[str, Any]], Stages]:
    """Run one mistake after the other on a reference's pictures.

    Args:
        recording: the reference.
        weights: those of the recording, under transformers' names.
        pictures: PIL images in RGB, the first ones of the recording or all.
        mistakes: which ones.

    Returns:
        The entries of recording.json, which tell the pictures that show a mistake. And the arrays of
        mistakes.safetensors: for the first of these, its numbers at the first stage that shows it
        and at "pooled". Nothing of a mistake that does not show, nor of stages behind one that the
        right port itself does not make as the reference does: that has another activation, say.
    """
    agreed = agreed_stages(recording, weights, len(pictures))
    entries = []
    arrays: Stages = {}
    for mistake in mistakes:
        port = Port(recording, weights, mistake)
        found = []
        for number, picture in enumerate(pictures):
            made = port.made(mistake.start, picture, recording.stages[number], agreed)
            first = first_shown(made, number, recording)
            if first:
                found.append((first, number, made))
        if found:
            # In some pictures the grid shows it, say, and in square ones the pixels.
            stage = min((first for first, *_ in found), key=recording.order.index)
            found = [one for one in found if one[0] == stage]
            entries.append(
                {
                    "name": mistake.name,
                    "words": mistake.words,
                    "stage": stage,
                    "pictures": [number for _, number, _ in found],
                    "right": [right for right, *_ in mistake.lines],
                    "wrong": ["\n".join(wrong) for _, *wrong in mistake.lines],
                }
            )
            for _, number, made in found[:MOST]:
                for name, numbers in kept(stage, made).items():
                    arrays[f"{mistake.name}/{number:03}.{name}"] = numbers
    return entries, arrays


def kept(first: str, made: Stages) -> Stages:
    """Of a mistake's stages what is kept; at the grid the pixels, too: many mistakes give one grid."""
    found = {}
    for stage, numbers in made.items():
        if stage in (first, "pooled") or (first, stage) == ("grid", "pixels"):
            found[stage] = sampled(numbers)
            if stage == "pixels":
                found[stage] = found[stage].astype(np.float16)  # it is enough for grey levels
    return found


def agreed_stages(recording: Recording, weights: Mapping[str, Array], count: int) -> list[str]:
    """The stages that the right port makes as the reference does, from the reference's stage before.

    ``count``: pictures that are looked at.
    """
    port = Port(recording, weights)
    agreed = ["pixels"]
    for stage in recording.order[2:]:
        for number, right in enumerate(recording.stages[:count]):
            made = port.made(stage, None, right, [stage])
            if not made or first_shown(made, number, recording):
                break
        else:
            agreed.append(stage)
    return agreed


def first_shown(made: Stages, number: int, recording: Recording) -> str | None:
    """The first stage of a picture that differs from the reference's by more than rounding.

    Where pixels are right within rounding, what follows from them is not looked at: other limits
    are for them.
    """
    for stage, numbers in made.items():
        pictures = [own[stage] for own in recording.stages]
        std, limits = recording.about["std"], float32_limits(stage)
        if Stage(stage, pictures, {number: numbers}, std, limits).row().parting:
            return stage
        if stage == "pixels":
            return None
    return None
