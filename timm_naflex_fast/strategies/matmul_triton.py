"""Placeholder."""
AVAILABLE = False
