"""Where the tokens of a batch lie: by coordinates, by one grid, or by the sizes of the images."""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling.kept import kept_by_arguments
from ..resampling.spec import OLDER_FLAG, ResizeSpec
from ..tracing import Context
from .checks import check_numbers, most_cells
from .grids import read_grids
from .plan import Plan, Run, Runs

FrameSizes = list[tuple[int, int, int]]
"""The sizes (t, h, w) of images on the host: t frames of h x w cells."""


def check_tokens(x: Tensor, channels: int, patch_coord: Tensor | None = None) -> None:
    """``x`` must be (B, N, channels), and ``patch_coord``, if given, (B, N, 2)."""
    shape = x.shape
    if len(shape) != 3 or shape[2] != channels:
        raise ValueError(
            f"x must be tokens of shape (B, N, {channels}), as wide as the table; "
            f"got {tuple(shape)}"
        )
    if patch_coord is None:
        return
    wrong = "patch_coord must hold (y, x) for each token"
    # The compiler of torch 2.4 can do neither this nor unbacked sizes.
    is_compiled = torch.compiler.is_dynamo_compiling() and hasattr(torch.compiler, "is_exporting")
    if is_compiled and len(patch_coord.shape) == 3 and patch_coord.shape[2] == 2:
        # Of sizes that are marked as unbacked the compiler knows nothing until the graph runs.
        torch._check(patch_coord.shape[0] == shape[0], lambda: wrong)
        torch._check(patch_coord.shape[1] == shape[1], lambda: wrong)
        return
    valid = (shape[0], shape[1], 2)
    if patch_coord.shape != valid:
        raise ValueError(
            f"{wrong}, shape {valid} for the shape of x; got {tuple(patch_coord.shape)}"
        )


class Coordinates(NamedTuple):
    """The coordinates (y, x) of all tokens, (B, N, 2), integers in any dtype."""

    values: Tensor

    def check(self, x: Tensor, channels: int) -> None:
        """``x`` must be tokens (B, N, channels), with coordinates for each."""
        check_tokens(x, channels, self.values)

    def coordinates(self, x: Tensor) -> Tensor:
        """(B, N, 2)."""
        return self.values

    def plan(self, x: Tensor, spec: ResizeSpec) -> Plan:
        """The grids of a batch, as timm reads them: largest coordinate + 1 on each axis.

        Args:
            x: (B, N, C) tokens, whose numbers are not used.
            spec: how the table is resized. In the plan it also holds the batch's largest grid,
                where that changes the rounding.

        Returns:
            A plan without a grid when the batch holds no token. Padding tokens, those from the
            h*w-th on, are not looked at, except where they get embeddings too.

        Raises:
            ValueError: a negative, non-finite or huge coordinate among a grid's tokens; a grid of
                more than 64 N + 4,096 cells. Further ones of ``read_grids``.
        """
        if x.numel() == 0:
            return Plan({}, spec)

        # The one copy from the device in a call: what follows is known on the host.
        runs = read_grids(self.values, x.device, spec.samples())
        # One token with a huge coordinate must not take memory out of proportion.
        length = x.shape[1]
        most = most_cells(length)
        for (h, w), of_size in runs.items():
            if h * w > most:
                raise ValueError(
                    f"patch_coord of sample {of_size[0].samples.start} spans a grid of {h} x {w} "
                    f"cells, too many for {length} tokens; valid are at most 64 x {length} + 4096 "
                    f"= {most} cells"
                )

        # Positions are rounded as part of the longest grid's.
        if spec.reference == OLDER_FLAG:
            heights, widths = zip(*runs)
            spec = spec._replace(batch_max=spec.resized_size(max(heights), max(widths)))
        return Plan(runs, spec)


class OneGrid(NamedTuple):
    """The grid of every sample of a batch of plain images, whose tokens are in row-major order."""

    h: int
    w: int

    def check(self, x: Tensor, channels: int) -> None:
        """``x`` must be tokens (B, h*w, channels)."""
        check_tokens(x, channels)
        h, w = self
        if x.shape[1] != h * w:
            raise ValueError(
                f"x must hold one token per cell of the {h} x {w} grid, {h * w}; "
                f"got shape {tuple(x.shape)}"
            )

    def coordinates(self, x: Tensor) -> Tensor:
        """(1, h*w, 2), for all samples, in a graph."""
        cell = torch.arange(x.shape[1], device=x.device)
        return torch.stack((cell // self.w, cell % self.w), -1)[None]

    def plan(self, x: Tensor, spec: ResizeSpec) -> Plan:
        """One grid. ``x`` (B, h*w, C) has one token for each cell."""
        batch, length, _ = x.shape
        run = Run(slice(0, batch), slice(0, length), length)
        return Plan({(int(self.h), int(self.w)): [run]}, spec)


TokenLayout = Coordinates | OneGrid


class Sizes(NamedTuple):
    """The size of each image, (B, 2) as (h, w) or (B, 3) as (t, h, w): a tensor or a sequence.

    ``merge``: cells in merge x merge blocks. ``length``: each image has so many tokens; None: as
    many as it has cells, one image after the other. ``embeds_padding``: those after an image get
    its first cell.
    """

    values: Any
    merge: int = 1
    length: int | None = None
    embeds_padding: bool = False

    def plan(self, device: torch.device, spec: ResizeSpec) -> tuple[int, Plan]:
        """How many tokens T all images have, and their plan as one sample (1, T, C).

        Raises:
            ValueError: those of ``on_host``.
        """
        runs: Runs = {}
        row = slice(0, 1)
        end = 0
        for t, h, w in self.on_host():
            of_size = runs.setdefault((h, w), [])
            cells = h * w if self.merge == 1 else _block_order(h, w, self.merge, device)
            first = end
            for _ in range(t):
                of_size.append(Run(row, slice(end, end + h * w), cells))
                end += h * w
            # An image's padding comes after its last frame.
            if self.length is not None:
                padding = slice(end, first + self.length)
                if self.embeds_padding:
                    of_size.append(Run(row, padding, 1))
                end = padding.stop
        return end, Plan(runs, spec)

    def on_host(self) -> FrameSizes:
        """The sizes, as (t, h, w). A tensor is read from its device.

        Raises:
            ValueError: other shapes or dtypes, a size below 1; ``merge`` does not divide a size;
                ``length`` is less than the tokens of an image.
        """
        listed = self.values
        if isinstance(listed, Tensor):
            check_numbers(listed, "grid_sizes")
            listed = listed.tolist()  # one copy from a device, not one for each number
        sizes: FrameSizes = []
        try:
            for size in listed:
                whole = [operator.index(n) for n in size]
                if len(whole) == 2:
                    whole.insert(0, 1)  # one frame
                t, h, w = whole
                sizes.append((t, h, w))
        except (TypeError, ValueError):
            raise _wrong_sizes(listed) from None
        for number, (t, h, w) in enumerate(sizes):
            if min(t, h, w) < 1:
                raise _wrong_sizes(listed)
            if h % self.merge or w % self.merge:
                raise ValueError(
                    f"merge must divide every height and width; {self.merge} does not divide "
                    f"{h} x {w}"
                )
            if self.length is not None and t * h * w > self.length:
                raise ValueError(
                    f"length must hold every image; image {number} has {t * h * w} tokens, length "
                    f"is {self.length}"
                )
        return sizes

    def as_tensor(self, length: int, context: Context) -> Tensor:
        """Sizes (B, 2) or (B, 3), int64, on the device on which they are given.

        The values are checked now; those of a tensor in a graph when it runs.
        """
        sizes = self.values
        if not isinstance(sizes, Tensor) or context in (None, "other_device"):
            return torch.tensor(self.on_host(), device="cpu").view(-1, 3)
        # What a graph cannot read it checks when it runs.
        sizes = sizes.to(torch.int64)
        is_positive = (sizes > 0).all()
        is_merged = (sizes[:, -2:] % self.merge == 0).all()
        is_short = (sizes.prod(1) <= length).all()
        # No number in the message: to write ``length`` into it would fix it, one graph for each
        # length.
        torch._assert_async(
            is_positive & is_merged & is_short,
            "grid_sizes must be at least 1, multiples of merge, and of at most ``length`` tokens",
        )
        return sizes


def _wrong_sizes(listed: Any) -> ValueError:
    return ValueError(
        "grid_sizes must hold (h, w) or (t, h, w) for each image, integers of at least 1, shape "
        f"(B, 2) or (B, 3); got {listed}"
    )


def coordinates_of(grid_sizes: Any, x: Tensor, context: Context) -> Tensor:
    """Coordinates (B, N, 2) for tokens ``x`` (B, N, C) from sizes (B, 2).

    Tokens after an image carry (0, 0).

    Raises:
        ValueError: not one size (h, w) for each sample, or those of ``Sizes.on_host``.
    """
    batch, length, _ = x.shape
    shape = torch.as_tensor(grid_sizes).shape
    if shape != (batch, 2):
        raise ValueError(
            f"grid_sizes must hold (h, w) for each of the {batch} samples, shape ({batch}, 2); "
            f"got shape {tuple(shape)}"
        )
    sizes = Sizes(grid_sizes, length=length).as_tensor(length, context)
    return row_major(sizes, length)


def row_major(sizes: Tensor, length: int, merge: int = 1) -> Tensor:
    """Coordinates (B, length, 2) from sizes (B, 2) or (B, 3), in merge x merge blocks.

    Tokens after the first frame carry (0, 0).
    """
    h, w = sizes[:, -2:, None].unbind(1)  # (B, 1)
    cell = torch.arange(length, device=sizes.device)[None]  # (1, length)
    # Token n lies in block n // merge**2, and blocks stand in row-major order too.
    block = cell // (merge * merge)
    inner = cell % (merge * merge)
    blocks = w // merge
    y = block // blocks * merge + inner // merge  # (B, length)
    x = block % blocks * merge + inner % merge
    return torch.stack((y, x), -1) * (cell < h * w)[..., None]


@kept_by_arguments
def _block_order(h: int, w: int, merge: int, device: torch.device) -> Tensor:
    """The cells of a grid in the order of its merge x merge blocks, (h*w,).

    >>> _block_order(2, 4, 2, torch.device("cpu"))
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    size = torch.tensor([(h, w)], device="cpu")
    y, x = row_major(size, h * w, merge)[0].unbind(1)
    return (y * w + x).to(device)
