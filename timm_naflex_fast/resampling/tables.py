"""The two kinds of position tables of timm, and what is asked of them.

Nobody else asks which kind it is: both have the same attributes and methods.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import by_position, dense, sparse
from .by_position import TokenPositions
from .dense import Embeddings
from .matrices import interpolate
from .spec import INTERPOLATIONS, LOOP, OLDER_FLAG, Reference, ResizeSpec, Size


@dataclass(frozen=True, eq=False)
class LearnedTable:
    """One learned table."""

    values: Tensor  # ([1,] H0, W0, C)

    interpolations: ClassVar[tuple[str, ...]] = INTERPOLATIONS  # those that are replaced
    has_operator: ClassVar[bool] = True  # in compiled graphs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The table alone."""
        return (self.values,)

    @property
    def size(self) -> Size:
        """H0 and W0."""
        return self.values.shape[-3], self.values.shape[-2]

    @property
    def channels(self) -> int:
        """C."""
        return self.values.shape[-1]

    @property
    def requires_grad(self) -> bool:
        """Whether autograd asks for its gradient."""
        return self.values.requires_grad

    @property
    def gradient_shapes(self) -> list[Sequence[int]]:
        """Those that ``gradients`` gives: without a leading 1."""
        return [self.values.shape[-3:]]

    @staticmethod
    def spec(
        reference: Reference,
        interpolation: str,
        antialias: bool,
        align_corners: bool,
        ar_preserving: bool,
    ) -> ResizeSpec:
        """How such a table is resized."""
        antialias = antialias and reference.antialiases
        return ResizeSpec(interpolation, antialias, align_corners, ar_preserving, reference)

    def own_size(self, spec: ResizeSpec) -> Size | None:
        """The size of the grid whose embeddings are the table itself; None if they are not."""
        if not spec.reference.takes_own_size_as_it_is:
            return None
        return self.values.shape[-3], self.values.shape[-2]

    def by_sums(
        self, sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype, token_dtype: torch.dtype
    ) -> Embeddings:
        """The embeddings of each size, by sparse sums in ``dtype``."""
        return sparse.resample(self.values, sizes, spec, dtype)

    def by_interpolate(self, size: Size, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (h*w, C) by timm's own call of ``F.interpolate``, in float32.

        Those of the table's own size are the table itself.
        """
        h, w = size
        if size == self.size:
            return self.values.reshape(h * w, -1)
        resized = interpolate(self.values, spec.resized_size(h, w), spec)
        if spec.ar_preserving:
            resized = resized[:, :h, :w]
        return resized.reshape(h * w, -1)

    def by_definition(self, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
        """The embeddings, float64, by dense matrices: PyTorch can derive them again."""
        return dense.resample(self.values, sizes, spec)

    def by_matrices(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The table (h, w, C) after the matrices (h, H0) and (w, W0), all of one dtype."""
        after_y = torch.tensordot(rows, self.values.view(self.values.shape[-3:]), 1)  # (h, W0, C)
        return columns @ after_y

    def at(self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (B, N, C) of tokens by their positions, in a graph."""
        table = self.values.reshape(self.values.shape[-3:])
        if by_position.few_taps(table, spec):
            embeddings = by_position.by_taps(table, positions, spec)
        else:
            embeddings = by_position.by_product(table, positions, spec)
        return embeddings.to(token_dtype)

    def on_grid(
        self,
        grid: tuple[Tensor, Tensor],
        cells: tuple[Tensor, Tensor],
        spec: ResizeSpec,
        token_dtype: torch.dtype,
    ) -> Tensor:
        """The embeddings (h*w, C) of one grid, in a graph; see ``by_position.grid_by_axes``."""
        table = self.values.reshape(self.values.shape[-3:])
        return by_position.grid_by_axes(table, grid, cells, spec).to(token_dtype)

    @staticmethod
    def gradients(
        sizes: Iterable[Size],
        gradient_of: Callable[[Size], Tensor],
        shapes: list[Sequence[int]],
        spec: ResizeSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """The gradient of the table, in ``dtype``.

        ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size.
        """
        return [sparse.gradient(sizes, gradient_of, shapes[0], spec, dtype, device)]


@dataclass(frozen=True, eq=False)
class FactorizedTables:
    """Two tables of lines. An embedding is the sum of one line of each, both cast before, as in timm.

    timm has no options for them but ``ar_preserving``.
    """

    y: Tensor  # ([1,] H0, C)
    x: Tensor  # ([1,] W0, C)

    interpolations: ClassVar[tuple[str, ...]] = ("linear",)
    has_operator: ClassVar[bool] = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Both."""
        return self.y, self.x

    @property
    def size(self) -> Size:
        """H0 and W0."""
        return self.y.shape[-2], self.x.shape[-2]

    @property
    def channels(self) -> int:
        """C."""
        return self.y.shape[-1]

    @property
    def requires_grad(self) -> bool:
        """Whether autograd asks for the gradient of one of them."""
        return self.y.requires_grad or self.x.requires_grad

    @property
    def gradient_shapes(self) -> list[Sequence[int]]:
        """Those that ``gradients`` gives: without a leading 1."""
        return [self.y.shape[-2:], self.x.shape[-2:]]

    @staticmethod
    def spec(
        reference: Reference,
        interpolation: str,
        antialias: bool,
        align_corners: bool,
        ar_preserving: bool,
    ) -> ResizeSpec:
        """How such tables are resized, whatever the options of a learned table are."""
        of_lines = OLDER_FLAG if reference.samples else LOOP
        return ResizeSpec("linear", False, False, ar_preserving, of_lines)

    def own_size(self, spec: ResizeSpec) -> None:
        """None: their sum is computed for every grid."""

    def by_sums(
        self, sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype, token_dtype: torch.dtype
    ) -> Embeddings:
        """The embeddings of each size, by two thin products in float64."""
        return dense.resample_factorized(self.tensors, sizes, spec, token_dtype)

    def by_interpolate(self, size: Size, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (h*w, C) by timm's own calls of ``F.interpolate``, in float32."""
        lines = []
        for table, keep, length in zip(self.tensors, size, spec.resized_size(*size)):
            line = table if table.shape[-2] == length else interpolate(table, (length,), spec)
            lines.append(line.flatten(0, -2)[:keep].to(token_dtype))
        y, x = lines  # (h, C), (w, C)
        return (y[:, None] + x).flatten(0, 1)

    def by_definition(self, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
        """The embeddings, float64, by dense matrices: PyTorch can derive them again."""
        return dense.resample_factorized(self.tensors, sizes, spec, torch.float64)

    def by_matrices(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The sum (h, w, C) after the matrices (h, H0) and (w, W0), all of one dtype."""
        y = rows @ self.y.view(self.y.shape[-2:])  # (h, C)
        x = columns @ self.x.view(self.x.shape[-2:])  # (w, C)
        return y[:, None] + x

    def at(self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (B, N, C) of tokens by their positions, in a graph."""
        to_h, to_w = by_position.resized_size(positions.h, positions.w, spec)
        of_y = by_position.by_line(self.y.flatten(0, -2), positions.y, to_h, spec)
        of_x = by_position.by_line(self.x.flatten(0, -2), positions.x, to_w, spec)
        return of_y.to(token_dtype) + of_x.to(token_dtype)

    def on_grid(
        self,
        grid: tuple[Tensor, Tensor],
        cells: tuple[Tensor, Tensor],
        spec: ResizeSpec,
        token_dtype: torch.dtype,
    ) -> Tensor:
        """The embeddings (h*w, C) of one grid, in a graph; see ``by_position.grid_by_axes``."""
        rows, columns = cells
        to_h, to_w = by_position.resized_size(*grid, spec)
        of_rows = by_position.by_line(self.y.flatten(0, -2), rows, to_h, spec)  # (1, h, C)
        of_columns = by_position.by_line(self.x.flatten(0, -2), columns, to_w, spec)  # (1, w, C)
        of_cells = of_rows.to(token_dtype)[:, :, None] + of_columns.to(token_dtype)[:, None]
        return of_cells.flatten(0, 2)

    @staticmethod
    def gradients(
        sizes: Iterable[Size],
        gradient_of: Callable[[Size], Tensor],
        shapes: list[Sequence[int]],
        spec: ResizeSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """The gradients of both tables, in float64.

        ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size.
        """
        return dense.factorized_gradients(sizes, gradient_of, shapes, spec, device)


Tables = LearnedTable | FactorizedTables
