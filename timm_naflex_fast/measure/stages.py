"""Two pipelines from picture to embedding, stage by stage: where do they part?

A pipeline is two functions: one reads pictures, the other is the image tower. Any will do. Stages, in
the order in which data flows: ``grid``, ``pixels``, ``patch_embedding``, ``position_embedding`` (the
tokens after it was added), ``block_0`` and so on, ``pooled``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

GREY_LEVEL = 1.01 * 2 / 255
"""Two right resizers may round a pixel to neighbouring grey levels; pixels here reach from -1 to 1."""
EMBEDDINGS = 2e-6
LATER = 2e-5
"""What float32 may move a number by, as a share of the stage's largest: embeddings, what follows."""
READ = ("grid", "pixels")  # the stages before the tower


class Inputs(NamedTuple):
    """Pictures as an image tower takes them."""

    grid: Tensor  # (B, 2) rows and columns of patches
    pixels: Tensor  # (B, N, patch height * patch width * channels), row by row, then padding
    valid: Tensor  # (B, N) bool, False for padding


Pictures = Sequence[Any]  # PIL images in RGB
Outputs = Mapping[str, Tensor]  # by stage: tokens (B, N, C), and "pooled" (B, D)


class Pipeline(NamedTuple):
    """From pictures to what a tower takes, and from that to what each stage gives."""

    read: Callable[[Pictures], Inputs]
    tower: Callable[[Inputs], Outputs]


class Reference(NamedTuple):
    """What the pipeline to compare with made of some pictures."""

    pictures: Pictures
    inputs: Inputs
    outputs: Outputs


class Difference(NamedTuple):
    """One stage of some pictures; pictures that have no common grid are left out of the tokens."""

    largest: Tensor  # (B,) largest difference
    squares: Tensor  # (B,) sum of the squared differences
    numbers: Tensor  # (B,) how many numbers were compared
    scale: Tensor  # (B,) the reference's largest number
    parts: Tensor  # (B,) bool: beyond rounding


@dataclass
class Stage:
    """One line of the table of stages."""

    stage: str
    largest: float
    rms: float
    scale: float  # the reference's largest number
    pictures: int  # how many are beyond rounding


class Trial(NamedTuple):
    """Our pipeline with one thing changed: if that closes the gap at ``stage``, it was the reason."""

    stage: str
    reason: str
    mend: str  # the setting that does the same, "" where there is none
    ours: Pipeline
    change_theirs: Callable[[Pipeline], Pipeline] = lambda theirs: theirs


class Comparison:
    """Adds up the differences of one pipeline over all pictures."""

    def __init__(self) -> None:
        self._found: dict[str, list[Difference]] = {}
        self._examples: dict[str, Pictures] = {}

    def add(self, pictures: Pictures, differences: Mapping[str, Difference]) -> None:
        """Take in what :func:`compare` found."""
        for stage, difference in differences.items():
            self._found.setdefault(stage, []).append(difference)
            if difference.parts.any():
                self._examples.setdefault(stage, pictures)

    def stages(self) -> list[Stage]:
        """A line for each stage, in order."""
        lines = []
        for name, found in self._found.items():
            squares = sum(one.squares.sum().item() for one in found)
            numbers = sum(one.numbers.sum().item() for one in found)
            line = Stage(
                stage=name,
                largest=max(one.largest.max().item() for one in found),
                rms=(squares / max(numbers, 1)) ** 0.5,
                scale=max(one.scale.max().item() for one in found),
                pictures=sum(int(one.parts.sum()) for one in found),
            )
            lines.append(line)
        return lines

    def first(self) -> str | None:
        """The first stage at which any picture is beyond rounding."""
        for name in self._found:
            if name in self._examples:
                return name
        return None

    def explain(
        self, theirs: Pipeline, trials: Iterable[Trial], same_patches: bool = False
    ) -> Trial | None:
        """The trial that closes the gap at the first stage, on the pictures that showed it first."""
        first = self.first()
        if first is None:
            return None
        pictures = self._examples[first]
        for trial in trials:
            if trial.stage != first:
                continue
            other = trial.change_theirs(theirs)
            if first in READ:  # the towers need not run
                found = compare_inputs(trial.ours.read(pictures), other.read(pictures))
            else:
                found = compare(trial.ours, refer(other, pictures), same_patches)
            if not found[first].parts.any():
                return trial
        return None


def refer(theirs: Pipeline, pictures: Pictures) -> Reference:
    """Send pictures through the pipeline to compare with."""
    inputs = theirs.read(pictures)
    return Reference(pictures, inputs, theirs.tower(inputs))


def compare(
    ours: Pipeline, reference: Reference, same_patches: bool = False
) -> dict[str, Difference]:
    """Differences at each stage, for the pictures of the reference.

    Args:
        ours: the pipeline in question.
        reference: what the other pipeline gave.
        same_patches: our tower gets the reference's patches: reading is taken out.
    """
    theirs = reference.inputs
    given = theirs if same_patches else ours.read(reference.pictures)
    found = compare_inputs(given, theirs)
    # Where the pixels agree our tower goes on with theirs, so that no stage counts that rounding
    # again.
    differ = found["grid"].parts | found["pixels"].parts
    pixels = torch.where(differ[:, None, None], given.pixels, theirs.pixels)
    outputs = ours.tower(given._replace(pixels=pixels))
    real = real_tokens(theirs)
    compared = real & ~found["grid"].parts[:, None]
    for stage, expected in reference.outputs.items():
        share = EMBEDDINGS if stage.endswith("_embedding") else LATER
        if stage == "pooled":
            limit = share * expected.abs().max().item()
            found[stage] = difference(outputs[stage], expected, limit)
        else:
            limit = share * expected[real].abs().max().item()
            found[stage] = difference(outputs[stage], expected, limit, compared)
    return found


def compare_inputs(ours: Inputs, theirs: Inputs) -> dict[str, Difference]:
    """Differences of what was read, for the pictures of one batch."""
    grid = difference(ours.grid, theirs.grid, limit=0)
    compared = real_tokens(theirs) & ~grid.parts[:, None]
    pixels = difference(ours.pixels, theirs.pixels, GREY_LEVEL, compared)
    return {"grid": grid, "pixels": pixels}


def real_tokens(inputs: Inputs) -> Tensor:
    """Which tokens (B, N) are no padding, whatever the mask says."""
    return torch.arange(inputs.pixels.shape[1]) < inputs.grid.prod(1, keepdim=True)


def difference(
    ours: Tensor, theirs: Tensor, limit: float, rows: Tensor | None = None
) -> Difference:
    """Compare two tensors (B, ...) picture by picture, of tokens (B, N, C) only ``rows`` (B, N)."""
    off = ours.double() - theirs.double()
    values = theirs.double()
    if rows is None:
        rows = torch.ones(off.shape[:1], dtype=torch.bool)
    hidden = ~rows.view(*rows.shape, *[1] * (off.ndim - rows.ndim))
    off = off.masked_fill(hidden, 0).flatten(1)  # (B, numbers)
    values = values.masked_fill(hidden, 0).flatten(1)
    largest = off.abs().amax(1)
    return Difference(
        largest=largest,
        squares=off.square().sum(1),
        numbers=(~hidden).expand(theirs.shape).flatten(1).sum(1),
        scale=values.abs().amax(1),
        parts=~(largest <= limit),  # NaN parts
    )


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each of these modules gives inside, under its stage's name."""
    found: dict[str, Tensor] = {}
    handles = []
    for stage, module in modules.items():

        def keep(_: Any, __: Any, output: Any, stage: str = stage) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            found[stage] = tensor.clone()  # what follows may write into it

        handles.append(module.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# One thing changed, in what a tower takes or in how it is called.


def swap_grid(inputs: Inputs) -> Inputs:
    """Heights for widths."""
    return inputs._replace(grid=inputs.grid.flip(1))


def channels_first(inputs: Inputs) -> Inputs:
    """Patches of RGB pictures from the order (y, x, channel) into (channel, y, x)."""
    pixels = inputs.pixels.unflatten(2, (-1, 3))  # (B, N, y * x, 3)
    return inputs._replace(pixels=pixels.transpose(2, 3).flatten(2))


def channels_last(inputs: Inputs) -> Inputs:
    """The inverse of :func:`channels_first`."""
    pixels = inputs.pixels.unflatten(2, (3, -1))  # (B, N, 3, y * x)
    return inputs._replace(pixels=pixels.transpose(2, 3).flatten(2))


def without_padding(pipeline: Pipeline) -> Pipeline:
    """The tower takes picture after picture, each cut to its own tokens: no mask can matter."""

    def tower(inputs: Inputs) -> Outputs:
        length = inputs.pixels.shape[1]
        found: dict[str, list[Tensor]] = {}
        for number, (h, w) in enumerate(inputs.grid.tolist()):
            picture = slice(number, number + 1)
            one = Inputs(
                inputs.grid[picture],
                inputs.pixels[picture, : h * w],
                torch.ones(1, h * w, dtype=torch.bool),
            )
            for stage, output in pipeline.tower(one).items():
                if stage != "pooled":
                    output = nn.functional.pad(output, (0, 0, 0, length - h * w))
                found.setdefault(stage, []).append(output)
        return {stage: torch.cat(outputs) for stage, outputs in found.items()}

    return Pipeline(pipeline.read, tower)


def input_trials(ours: Pipeline) -> list[Trial]:
    """What can be tried with any pipeline of RGB pictures."""
    read, tower = ours

    def reads(change: Callable[[Inputs], Inputs]) -> Pipeline:
        return Pipeline(lambda pictures: change(read(pictures)), tower)

    def takes(change: Callable[[Inputs], Inputs]) -> Pipeline:
        return Pipeline(read, lambda inputs: tower(change(inputs)))

    swapped = "height and width are swapped on one side"
    order = "patch order: one side has (channel, y, x), the other (y, x, channel)"
    mask = "mask: without padding they agree, so one side does not mask it"
    return [
        Trial("grid", swapped, "", reads(swap_grid)),
        Trial("pixels", order, "", reads(channels_first)),
        Trial("pixels", order, "", reads(channels_last)),
        Trial("patch_embedding", f"{order}, in the weights", "", takes(channels_first)),
        Trial("patch_embedding", f"{order}, in the weights", "", takes(channels_last)),
        Trial("position_embedding", f"{swapped}, in the coordinates", "", takes(swap_grid)),
        Trial("block_0", mask, "", without_padding(ours), without_padding),
        Trial("pooled", mask, "", without_padding(ours), without_padding),
    ]
