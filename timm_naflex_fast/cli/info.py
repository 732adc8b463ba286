"""What ``naflex-fast info`` prints: everything that a report of a problem should say."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from ..patching.install import status
from ..resampling import cache

PACKAGES = ("torch", "torchvision", "timm", "triton")


def about() -> str:
    """Versions, what is replaced by what, CUDA and Triton, and the caches: what they hold and may hold at most."""
    from .. import __version__

    lines = [f"{'timm_naflex_fast':<17} {__version__}", *(f"{name:<17} {_version(name)}" for name in PACKAGES)]
    lines += [f"{'python':<17} {platform.python_version()}, {platform.platform()}", f"{'CUDA':<17} {_cuda()}", ""]
    lines.append(f"{'caches':<17} {cache.report()}")
    return "\n".join([str(status()), "", *lines])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    if not torch.cuda.is_available():
        return f"not available (torch was built for {torch.version.cuda or 'no CUDA'})"
    return f"{torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
