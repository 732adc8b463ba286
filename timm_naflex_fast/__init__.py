"""Fast and exact resampling of the embeddings of timm's NaFlex vision transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import functional
    from .patching.install import Handle, disable, enable, status

__version__ = "1.0.0rc2"
__all__ = ["Handle", "disable", "enable", "functional", "status"]


def __getattr__(name: str) -> Any:
    """Import torch when a public name is first used: ``naflex-fast --help`` answers without it."""
    if name == "functional":
        return import_module(".functional", __name__)
    if name in __all__:
        return getattr(import_module(".patching.install", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and no helper of this file."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
