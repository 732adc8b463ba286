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
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        mark = line[:1]
        text = line[2:]
        try:
            if mark in ("", "#"):
                continue
            if mark == "[":
                start = line[1:-1]
            elif mark == "-":
                found[-1].lines.append([text])
            elif mark == "+":
                pair = found[-1].lines[-1]
                pair.append(text)
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
        stage = f"block_{number}"
        right = "return block("
        wrong = f"return x if number == {number} else block("
        words = f"block {number} is left out"
        mistake = Mistake(f"{stage}_left_out", words, stage, [[right, wrong]])
        found.append(mistake)
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
        there = [file for file in PLACES if file.is_file()]
        text = there[0].read_text(encoding="utf-8")
        if mistake:
            text = with_lines(text, mistake)
        # What a wrong line may use.
        self.names: dict[str, Any] = {**vars(wrong_lines), **self.about}
        self.names["__name__"] = NAME
        code = compile(text, NAME, "exec")
        exec(code, self.names)
        filters = self.names["Image"].Resampling
        filter_name = self.about["filter"].upper()
        self.names["FILTER"] = filters[filter_name]

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
        place = order.index(start)
        before = order[place - 1]
        grid = right["grid"]
        x = right.get(before)
        made: Stages = {}
        try:
            if start == "picture":
                read_picture = self.names["read_picture"]
                grid, x = read_picture(picture, self.about["patch_size"], self.about["max_patches"])
                made["grid"] = np.array(grid, np.int32)
                place = order.index("pixels")
            count = int(np.prod(grid))
            self.names.update(count=count, given=right)
            step = self.names["step"]
            for stage in order[place:]:
                if stage not in wanted:
                    break
                x = step(stage, x, grid, self.about, self.table, self.weights)
                x = x.astype(np.float32)
                if stage == "pooled":
                    made[stage] = x
                else:
                    made[stage] = x[:count]  # without padding
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
        # The wrong lines are indented as the right one is.
        _, _, line = start.rpartition("\n")
        indent = len(line) - len(line.lstrip())
        break_and_indent = "\n" + line[:indent]
        instead = break_and_indent.join(wrong)
        text = start + instead + rest[0]
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
            right = recording.stages[number]
            made = port.made(mistake.start, picture, right, agreed)
            first = first_shown(made, number, recording)
            if first:
                found.append((first, number, made))
        if not found:
            continue
        # In some pictures the grid shows it, say, and in square ones the pixels.
        firsts = [first for first, *_ in found]
        stage = min(firsts, key=recording.order.index)
        shown = {number: made for first, number, made in found if first == stage}
        entry = entry_of(mistake, stage, list(shown))
        entries.append(entry)
        for number in entry["pictures"][:MOST]:
            for name, numbers in kept(stage, shown[number]).items():
                arrays[f"{mistake.name}/{number:03}.{name}"] = numbers
    return entries, arrays


def entry_of(mistake: Mistake, stage: str, pictures: Sequence[int]) -> dict[str, Any]:
    """What recording.json says of a mistake that these pictures show first at a stage."""
    right_parts = []
    wrong_parts = []
    for right, *wrong in mistake.lines:
        right_parts.append(right)
        wrong_parts.append("\n".join(wrong))
    return {
        "name": mistake.name,
        "words": mistake.words,
        "stage": stage,
        "pictures": pictures,
        "right": right_parts,
        "wrong": wrong_parts,
    }


def kept(first: str, made: Stages) -> Stages:
    """Of a mistake's stages what is kept; at the grid the pixels, too: many mistakes give one grid."""
    found = {}
    for stage, numbers in made.items():
        wanted = stage in (first, "pooled")
        if first == "grid" and stage == "pixels":
            wanted = True
        if not wanted:
            continue
        few = sampled(numbers)
        if stage == "pixels":
            few = few.astype(np.float16)  # it is enough for grey levels
        found[stage] = few
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
            if not made:
                break
            if first_shown(made, number, recording):
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
        std = recording.about["std"]
        limits = float32_limits(stage)
        compared = Stage(stage, pictures, {number: numbers}, std, limits)
        row = compared.row()
        if row.parting:
            return stage
        if stage == "pixels":
            return None
    return None
