"""What a port (a model written anew for another library) computes, and what it should compute."""

from .compare import compare_folders
from .identify import identify_resampling

__version__ = "1.0.0rc5"
__all__ = ["compare_folders", "identify_resampling"]
