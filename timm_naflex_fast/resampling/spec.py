"""How a library resizes its position table, in one value."""

from dataclasses import dataclass

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]


@dataclass(frozen=True)
class ResizeSpec:
    """How a library resamples its position table.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"``
            for the two of a factorized one.
        antialias: widen the filter when the table is made smaller; always False for "linear" and
            with ``F.grid_sample``, which have none.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        reference: whose result it is: ``"interpolate"``, PyTorch's ``F.interpolate``; or
            ``F.grid_sample`` without antialiasing, at the positions of timm's
            ``pos_embed_use_grid_sample``: ``"grid_sample"`` of newer timm, ``"affine_grid"`` of
            older timm, and of every timm for "linear".
        batch_max: for ``"affine_grid"`` alone, the largest height and width of the batch: they
            change the rounding.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    reference: str = "interpolate"
    batch_max: Size = (0, 0)

    def __post_init__(self) -> None:
        is_linear = self.interpolation == "linear"
        if is_linear and self.use_grid_sample:
            object.__setattr__(self, "reference", "affine_grid")
        if is_linear or self.use_grid_sample:
            object.__setattr__(self, "antialias", False)

    @property
    def use_grid_sample(self) -> bool:
        """Whether it resizes as timm's flag of that name does, which samples at every coordinate.

        So padding tokens get embeddings too, and a grid of the table's own size does not simply get
        the table.
        """
        return self.reference != "interpolate"

    def takes_table_itself(self, grid: Size, table_size: tuple[int, ...]) -> bool:
        """Whether the embeddings of a grid are a learned table itself, because the sizes match."""
        return grid == table_size and not self.use_grid_sample

    def resized_size(self, h: int, w: int) -> Size:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        if not self.ar_preserving:
            return h, w
        longest = max(h, w)
        return longest, longest
