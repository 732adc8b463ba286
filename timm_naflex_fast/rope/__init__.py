"""Rotary embeddings for a whole NaFlex batch: one formula serves timm's four types."""
