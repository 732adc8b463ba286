"""One file per strategy. Each adds resampled embeddings into ``x`` in place, from plain tensors and groups of grids."""
