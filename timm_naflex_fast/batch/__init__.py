"""The tokens of one batch: their grids, where they lie, and the sums over them."""
