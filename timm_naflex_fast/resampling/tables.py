"""The two kinds of position tables of timm, and what is asked of them.

Nobody else asks which kind it is: both have the same attributes and methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import by_position, dense, sparse
from .by_position import TokenPositions
from .dense import Embeddings
from .matrices import interpolate
from .spec import INTERPOLATIONS, LOOP, OLDER_FLAG, Resampling, ResizeSpec, Size


@dataclass(frozen=True, eq=False)
class _Tables:
    """What both kinds have: one tensor, or two, each perhaps with a leading 1."""

    tensors: tuple[Tensor, ...]
    axes: ClassVar[int]  # of each tensor, without the leading 1

    @property
    def size(self) -> Size:
        """H0 and W0."""
        return self.tensors[0].shape[-self.axes], self.tensors[-1].shape[-2]

    @property
    def channels(self) -> int:
        """C."""
        return self.tensors[0].shape[-1]

    @property
    def shapes(self) -> list[Sequence[int]]:
        """Of the tensors without a leading 1, and of their gradients."""
        return [tensor.shape[-self.axes :] for tensor in self.tensors]

    @property
    def without_leading_1(self) -> list[Tensor]:
        """The tensors in these shapes."""
        return [tensor.reshape(tensor.shape[-self.axes :]) for tensor in self.tensors]

    def own_size(self, spec: ResizeSpec) -> Size | None:
        """The size of the grid whose embeddings are the table itself; None if there is none."""
        return None

    def dense_products(
        self, sizes: Iterable[Size], spec: ResizeSpec, token_dtype: torch.dtype
    ) -> Embeddings:
        """The embeddings of each size by dense matrices. PyTorch can derive them again."""
        # Once for all sizes. Neither autocast nor TF32 rounds a product in float64.
        exact = type(self)(tuple(tensor.double() for tensor in self.without_leading_1))
        for size in sizes:
            of_size = spec
            if size == self.own_size(spec):
                of_size = spec._replace(ar_preserving=False)  # then both matrices are identities
            device = exact.tensors[0].device
            rows, columns = dense.axis_matrices(*size, self.size, of_size, device)
            yield size, exact.product_with(rows, columns, token_dtype)

    def product_with(self, rows: Tensor, columns: Tensor, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (h*w, C) by the matrices (h, H0) and (w, W0), float64 like the tables."""
        raise NotImplementedError


class LearnedTable(_Tables):
    """One learned table ([1,] H0, W0, C)."""

    axes = 3
    interpolations = INTERPOLATIONS  # those that are replaced
    has_operator = True  # in compiled graphs
    gradients = staticmethod(sparse.gradients)

    @staticmethod
    def spec_of(spec: ResizeSpec) -> ResizeSpec:
        """How such a table is resized by these options and this reference."""
        # The flag has no filter to widen, whatever the model's setting for it says.
        if spec.reference.antialiases:
            return spec
        return ResizeSpec(
            spec.interpolation, False, spec.align_corners, spec.ar_preserving, spec.reference
        )

    def own_size(self, spec: ResizeSpec) -> Size | None:
        """The table's own, which timm's loop does not resize."""
        return self.size if spec.reference.skips_own_size else None

    def sparse_sums(self, sizes: Iterable[Size], resampling: Resampling) -> Embeddings:
        """The embeddings of each size by sparse sums, in ``resampling.dtype``."""
        return sparse.resample(self.tensors[0], sizes, resampling.spec, resampling.dtype)

    def interpolated(self, size: Size, resampling: Resampling) -> Tensor:
        """The embeddings (h*w, C) by timm's own call of ``F.interpolate``, in float32."""
        h, w = size
        resized = self.tensors[0]
        if size != self.own_size(resampling.spec):
            resized = interpolate(resized, resampling.spec.resized_size(h, w), resampling.spec)
            if resampling.spec.ar_preserving:
                resized = resized[:, :h, :w]
        return resized.reshape(h * w, -1)

    def product_with(self, rows: Tensor, columns: Tensor, token_dtype: torch.dtype) -> Tensor:
        """The definition itself."""
        return dense.definition(rows, self.tensors[0], columns)

    def at(self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (B, N, C) of tokens by their positions, in a graph."""
        (table,) = self.without_leading_1
        # Both give the same sums. Which one costs less, the table's size tells.
        by = (
            by_position.gathered_taps
            if by_position.reads_few_cells(table, spec)
            else by_position.one_product
        )
        positions = by_position.resized(positions, spec, self.own_size(spec))
        return by(table, positions, spec).to(token_dtype)

    def on_grid(
        self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype
    ) -> Tensor:
        """The embeddings (1, h*w, C) of one grid, in a graph.

        ``positions`` of its rows (1, h), and of its columns (1, w).
        """
        (table,) = self.without_leading_1
        positions = by_position.resized(positions, spec, self.own_size(spec))
        return by_position.product_per_axis(table, positions, spec).to(token_dtype)


class FactorizedTables(_Tables):
    """Two tables of lines, ([1,] H0, C) and ([1,] W0, C): an embedding is the sum of two lines.

    Both are cast before they are added, as in timm, which has no options for them but
    ``ar_preserving``.
    """

    axes = 2
    interpolations = ("linear",)
    has_operator = False
    gradients = staticmethod(dense.factorized_gradients)

    @staticmethod
    def spec_of(spec: ResizeSpec) -> ResizeSpec:
        """How such tables are resized, whatever the options of a learned table are."""
        # In every release timm takes the lines of its flag from an affine grid.
        of_lines = OLDER_FLAG if spec.reference.samples else LOOP
        return ResizeSpec("linear", False, False, spec.ar_preserving, of_lines)

    def sparse_sums(self, sizes: Iterable[Size], resampling: Resampling) -> Embeddings:
        """By definition: two thin products, which sparse sums do not beat."""
        return self.dense_products(sizes, resampling.spec, resampling.token_dtype)

    def interpolated(self, size: Size, resampling: Resampling) -> Tensor:
        """The embeddings (h*w, C) by timm's own calls of ``F.interpolate``, in float32."""
        lines = []
        # timm resizes a line only if its length differs, and crops it after that.
        for table, keep, length in zip(self.tensors, size, resampling.spec.resized_size(*size)):
            line = (
                table
                if table.shape[-2] == length
                else interpolate(table, (length,), resampling.spec)
            )
            lines.append(line.flatten(0, -2)[:keep].to(resampling.token_dtype))
        y, x = lines  # (h, C), (w, C)
        return (y[:, None] + x).flatten(0, 1)

    def product_with(self, rows: Tensor, columns: Tensor, token_dtype: torch.dtype) -> Tensor:
        """The sums of two products."""
        lines_y, lines_x = self.tensors
        y = (rows @ lines_y).to(token_dtype)  # (h, C)
        x = (columns @ lines_x).to(token_dtype)  # (w, C)
        return (y[:, None] + x).flatten(0, 1)

    def at(self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
        """The embeddings (B, N, C) of tokens by their positions, in a graph."""
        lines_y, lines_x = self.without_leading_1
        h, w, y, x = by_position.resized(positions, spec, own_size=None)
        of_y = by_position.resized_lines(lines_y, y, h, spec).to(token_dtype)
        of_x = by_position.resized_lines(lines_x, x, w, spec).to(token_dtype)
        return of_y + of_x

    def on_grid(
        self, positions: TokenPositions, spec: ResizeSpec, token_dtype: torch.dtype
    ) -> Tensor:
        """The embeddings (1, h*w, C) of one grid, in a graph.

        ``positions`` of its rows (1, h), and of its columns (1, w).
        """
        h, w, y, x = positions
        rows = y[..., None]  # (1, h, 1)
        columns = x[:, None]  # (1, 1, w)
        cells = self.at(TokenPositions(h, w, rows, columns), spec, token_dtype)  # (1, h, w, C)
        return cells.flatten(1, 2)


Tables = LearnedTable | FactorizedTables
