"""The models that share a vision tower, and the convention by which each resamples its table.

Tests compare each with the original library's own code (ports/tests/test_families.py).
"""

from .conventions import Convention

_SMOOTH = Convention("bilinear", None)
_BILINEAR = Convention("bilinear", None, antialias=False, outside="border")
_BICUBIC = Convention("bicubic", -0.75, antialias=False, outside="border")

FAMILIES = {
    "siglip2": _SMOOTH,  # NaFlex
    "lfm2-vl": _SMOOTH,
    "moonvit": _BICUBIC,  # Kimi-VL, Kimi-K2.5
    "qwen3-vl": _BILINEAR._replace(align_corners=True, positions="corners", merge=2),
    "ovis2.5": _BICUBIC._replace(merge=2),
    "radio": _BILINEAR._replace(ar_preserving=True),
}
