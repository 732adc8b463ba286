"""Two pipelines from picture to embedding, stage by stage: where do they part?

A pipeline is two functions: one reads pictures, the other is the image tower. Any will do. Stages, in
the order in which data flows: ``grid``, ``pixels``, ``patch_embedding``, ``position_embedding`` (the
tokens after it was added), ``block_0`` and so on, ``pooled``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

GREY_LEVEL = 1.01 * 2 / 255
"""Two right resizers may round a pixel to neighbouring grey levels; pixels here reach from -1 to 1."""
EMBEDDINGS = 2e-6
LATER = 2e-5
"""What float32 may move a number by, as a share of the stage's largest: embeddings, what follows."""


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
    """One stage of some pictures. No tokens are compared of a picture whose two grids differ."""

    largest: Tensor  # (B,) largest difference
    squares: Tensor  # (B,) sum of the squared differences
    numbers: Tensor  # (B,) how many numbers were compared
    scale: Tensor  # (B,) the reference's largest number
    limit: Tensor  # (B,) the largest difference that is rounding
    parts: Tensor  # (B,) bool: beyond rounding


class Trial(NamedTuple):
    """Two pipelines with one thing changed: if that closes the gap, it was the reason."""

    reason: str
    mend: str  # the command's option that does the same, "" where there is none
    ours: Pipeline
    theirs: Pipeline


class Comparison:
    """Adds up the differences of one pipeline over all pictures."""

    def __init__(self, ours: Pipeline) -> None:
        self.ours = ours
        self.pictures = 0  # how many were compared
        self._found: dict[str, list[Difference]] = {}
        self._examples: dict[str, Pictures] = {}  # the first picture that parts at a stage

    def add(self, reference: Reference) -> None:
        """Compare with what the other pipeline made of some pictures."""
        self.pictures += len(reference.pictures)
        for stage, difference in compare(self.ours, reference).items():
            self._found.setdefault(stage, []).append(difference)
            if difference.parts.any():
                example = int(difference.parts.nonzero()[0])
                self._examples.setdefault(stage, [reference.pictures[example]])

    def stages(self) -> list[dict[str, Any]]:
        """A line for each stage, in order; "pictures" is how many are beyond rounding."""
        lines = []
        for name, found in self._found.items():
            largest, squares, numbers, scale, limit, parts = map(torch.cat, zip(*found))
            line = {
                "stage": name,
                "largest": largest.max().item(),
                "rms": (squares.sum() / numbers.sum().clamp(min=1)).sqrt().item(),
                "scale": scale.max().item(),  # the reference's largest number
                "limit": limit.max().item(),  # the largest difference that is rounding
                "pictures": int(parts.sum()),
            }
            lines.append(line)
        return lines

    def first(self) -> str | None:
        """The first stage at which any picture is beyond rounding."""
        for name in self._found:
            if name in self._examples:
                return name
        return None

    def explain(self, trials: Iterable[Trial]) -> Trial | None:
        """The trial that closes the gap at the first stage, on the first picture that shows it."""
        first = self.first()
        if first is None:
            return None
        for trial in trials:
            found = compare(trial.ours, refer(trial.theirs, self._examples[first]))
            if not found[first].parts.any():
                return trial
        return None


def refer(theirs: Pipeline, pictures: Pictures) -> Reference:
    """Send pictures through the pipeline to compare with."""
    inputs = theirs.read(pictures)
    return Reference(pictures, inputs, theirs.tower(inputs))


def compare(ours: Pipeline, reference: Reference) -> dict[str, Difference]:
    """Differences at each stage, for the pictures of the reference."""
    theirs = reference.inputs
    given = ours.read(reference.pictures)
    whole = torch.ones(len(theirs.grid), 1, dtype=torch.bool)
    grid = difference(given.grid, theirs.grid, whole)
    # Which tokens are no padding, whatever the mask says, in pictures with a common grid.
    real = torch.arange(theirs.pixels.shape[1]) < theirs.grid.prod(1, keepdim=True)  # (B, N)
    compared = real & ~grid.parts[:, None]
    pixels = difference(given.pixels, theirs.pixels, compared, atol=GREY_LEVEL)
    found = {"grid": grid, "pixels": pixels}

    # Where the pixels agree our tower goes on with theirs, so that no stage counts that rounding
    # again.
    differ = grid.parts | pixels.parts
    shared = torch.where(differ[:, None, None], given.pixels, theirs.pixels)
    outputs = ours.tower(given._replace(pixels=shared))
    for stage, expected in reference.outputs.items():
        rows = whole if stage == "pooled" else compared
        share = EMBEDDINGS if stage.endswith("_embedding") else LATER
        found[stage] = difference(outputs[stage], expected, rows, rtol=share)
    return found


def difference(
    ours: Tensor, theirs: Tensor, rows: Tensor, *, atol: float = 0.0, rtol: float = 0.0
) -> Difference:
    """Compare two tensors picture by picture.

    Args:
        ours: (B, ...).
        theirs: of the same shape.
        rows: (B, R) bool, which of a picture's R rows of numbers are compared.
        atol: largest difference that is rounding.
        rtol: the same as a share of the largest number of all pictures; both together count.
    """
    expected = _compared(theirs, rows)
    off = _compared(ours, rows) - expected  # (B, numbers)
    largest = off.abs().amax(1)
    scale = expected.abs().amax(1)
    limit = (atol + rtol * scale.max()).expand_as(scale)
    return Difference(
        largest=largest,
        squares=off.square().sum(1),
        numbers=rows.sum(1) * (theirs.numel() // rows.numel()),
        scale=scale,
        limit=limit,
        parts=~(largest <= limit),  # NaN parts
    )


def _compared(tensor: Tensor, rows: Tensor) -> Tensor:
    """A picture's numbers in float64, zero in other rows: (B, numbers)."""
    numbers = tensor.double().reshape(*rows.shape, -1)
    return numbers.masked_fill(~rows[..., None], 0).flatten(1)


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each of these modules gives inside, under its stage's name."""
    found: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for stage, module in modules.items():

            def keep(_: Any, __: Any, output: Any, stage: str = stage) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                found[stage] = tensor.clone()  # what follows may write into it

            hooks.enter_context(module.register_forward_hook(keep))
        yield found


def input_trials(ours: Pipeline, theirs: Pipeline) -> list[Trial]:
    """What can be tried with any pipeline of RGB pictures."""

    def reordered(pictures: Pictures) -> Inputs:
        inputs = ours.read(pictures)
        pixels = inputs.pixels.unflatten(2, (-1, 3))  # (B, N, y * x, 3)
        return inputs._replace(pixels=pixels.transpose(2, 3).flatten(2))

    order = "patch order: one side has (channel, y, x), the other (y, x, channel)"
    mask = "mask: without padding they agree, so one side does not mask it"
    return [
        Trial(order, "", Pipeline(reordered, ours.tower), theirs),
        Trial(mask, "", without_padding(ours), without_padding(theirs)),
    ]


def without_padding(pipeline: Pipeline) -> Pipeline:
    """For one picture, cut to its own tokens: no mask can matter."""

    def read(pictures: Pictures) -> Inputs:
        inputs = pipeline.read(pictures)
        pixels = inputs.pixels[:, : int(inputs.grid.prod())]
        valid = torch.ones(pixels.shape[:2], dtype=torch.bool)
        return Inputs(inputs.grid, pixels, valid)

    return Pipeline(read, pipeline.tower)
