"""The names of the strategies."""

STRATEGIES = ("interpolate_cached", "grid_sample", "matmul")
