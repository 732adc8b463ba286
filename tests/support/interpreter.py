"""Whether Triton, and its interpreter on the CPU, can run here."""

import importlib.util
import os
from importlib.metadata import version


def _release(name: str) -> tuple[int, ...]:
    return tuple(map(int, version(name).split(".")[:2]))


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.6's interpreter turns arrays of one element into integers, which NumPy 2.4 refuses; 3.7 does not.
TOO_NEW_NUMPY = HAS_TRITON and _release("triton") < (3, 7) and _release("numpy") >= (2, 4)
