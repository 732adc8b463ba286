"""Rotary embeddings for a whole NaFlex batch: one formula for timm's four types, ``angle = p_0 .
f_0 + p_1 . f_1``."""
