"""The maths of resampling: of one table, for grids of given sizes; no batch, no library."""
