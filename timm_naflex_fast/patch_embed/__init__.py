"""Patch-embedding kernels resampled to other patch sizes."""
