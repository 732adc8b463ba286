"""Fast and exact resampling of the embeddings of timm's NaFlex vision transformers."""

from . import functional
from .patching.install import Handle, disable, enable, status

__version__ = "0.1.0"
__all__ = ["Handle", "disable", "enable", "functional", "status"]
