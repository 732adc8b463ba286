"""Timing the strategies against timm, its alternatives and the floor of memory traffic."""
