"""``naflex-fast info``: everything that a report of a problem should say.

Tests: tests/commands/cli/test_main.py.
"""

import argparse
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from .checks import announce

PACKAGES = (
    "timm-naflex-fast",
    "timm",
    "torch",
    "torchvision",
    "triton",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "openvino",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``info`` has no options."""


def action(options: argparse.Namespace) -> int:
    """Print versions, CUDA, and what is patched in this process, not in another.

    The versions come from the packages' metadata; timm is not imported for them.
    """
    # torch alone takes seconds to import; a line at once shows that something happens.
    announce("looking at this installation ...")
    import torch

    from ...patching.status import status

    rows = dict.fromkeys(PACKAGES, "not installed")
    # From the metadata, not from the modules: to import all of them would take a minute.
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            rows[name] = version(name)
    rows["python"] = f"{platform.python_version()}, {platform.platform()}"
    seen = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows["CUDA"] = f"torch was built for {torch.version.cuda or 'no CUDA'}; GPUs: {seen}"
    for name, value in rows.items():
        print(f"{name:<17} {value}")
    print(
        f"{status()}\n\nThis is about this process. In another one, print(timm_naflex_fast.status())."
    )
    return 0
