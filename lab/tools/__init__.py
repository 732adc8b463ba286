"""What writes the pages, and what a release is checked with."""
