"""Fast and exact resampling of the embeddings of timm's NaFlex vision transformers."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "1.0.0rc5"
__all__ = ["Handle", "Status", "disable", "enable", "functional", "status"]

if TYPE_CHECKING:
    from . import functional
    from .patching.install import Handle, disable, enable
    from .patching.status import Status, status
else:
    # A checker of types that saw this function would take every name for a public one.
    def __getattr__(name: str) -> object:
        """Import torch when a public name is first used: ``naflex-fast --help`` needs none."""
        if name == "functional":
            return import_module(".functional", __name__)
        if name in __all__:
            home = "status" if name in ("Status", "status") else "install"
            return getattr(import_module(f".patching.{home}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and no helper of this file."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]
