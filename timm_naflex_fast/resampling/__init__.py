"""The maths of resampling. Of this package it imports ``tracing`` alone: no strategy, no backend,
no library."""
