"""Fast and exact resampling of the embeddings of timm's NaFlex vision transformers."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "1.0.0rc2"
__all__ = ["Handle", "Status", "disable", "enable", "functional", "status"]

if TYPE_CHECKING:
    from . import functional
    from .patching.install import Handle, Status, disable, enable, status
else:
    # A checker of types that saw this function would take every name for a public one.
    def __getattr__(name: str) -> object:
        """Import torch when a public name is first used: ``naflex-fast --help`` needs none."""
        if name == "functional":
            return import_module(".functional", __name__)
        if name in __all__:
            return getattr(import_module(".patching.install", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and no helper of this file."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
