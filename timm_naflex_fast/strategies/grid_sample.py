"""``grid_sample``: the result of timm's ``pos_embed_use_grid_sample``, by the sums of ``matmul``.

The same sums, with matrices that are read off ``F.grid_sample`` at timm's positions.
"""

from ..resampling import sparse
from .base import Strategy

STRATEGY = Strategy(sparse.resample, reference="grid_sample", for_grid_sample="grid_sample")
