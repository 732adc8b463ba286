"""What measures and tests the project itself: benchmarks/, tools/, the nox file, and results/."""
