"""A small model hub on loopback for the real client (huggingface_hub) of a child process, and stand-in weights."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

COMMIT = "0" * 39 + "1"


class Handler(SimpleHTTPRequestHandler):
    """Answers ``/{owner}/{name}/resolve/{revision}/{file}`` from the folder root/owner/name, with a hub's headers."""

    root: Path
    requests: list[str]

    def translate_path(self, path: str) -> str:
        """The file of a request, which is written down."""
        self.requests.append(f"{self.command} {path}")
        owner, name, _, _, file = (*path.strip("/").split("/", 4), *[""] * 5)[:5]
        return str(self.root / owner / name / file)

    def end_headers(self) -> None:
        """Those of a hub too."""
        self.send_header("ETag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def send_error(self, code: int, *_: object) -> None:
        """As a hub says that there is no such file."""
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal: ``requests`` has it."""


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories under ``root`` on loopback: (address, the requests so far)."""
    handler = type("RootedHandler", (Handler,), {"root": root, "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.requests
        finally:
            server.shutdown()
            thread.join()


def environment(address: str, home: Path) -> dict[str, str]:
    """A child process's environment in which the client knows this hub and no other, and has nothing cached.

    The client reads its settings when it is imported, so they cannot be changed in a running one.
    """
    left = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "PROXY" not in k.upper()}
    left.pop("TRANSFORMERS_OFFLINE", None)
    left["PYTHONPATH"] = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), *sys.path) if path)
    return left | {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def stand_in(architecture: str, file: Path, seed: int = 0) -> None:
    """Write random weights in float16 with the names and shapes of ``architecture``, as timm uploads them.

    Variances are kept from block to block, so that drift goes through the depth of the model as through a trained one.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, value in timm.create_model(architecture, num_classes=0).state_dict().items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(value.shape, dtype=torch.float16)
        elif "norm" in name:
            weights[name] = torch.ones(value.shape, dtype=torch.float16)
        else:
            scale = 0.3 if name == "embeds.pos_embed" else value.shape[-1] ** -0.5
            weights[name] = torch.randn(value.shape, generator=generator).mul_(scale).half()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, file)
