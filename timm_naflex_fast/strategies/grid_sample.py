"""``grid_sample``: the result of timm's ``pos_embed_use_grid_sample``, by the sums of ``matmul``."""

from .matmul import SparseSums


class GridSample(SparseSums):
    """The same sums, with matrices that are read off ``F.grid_sample`` at timm's positions."""

    sampler = "grid_sample"


STRATEGY = GridSample()
