"""What several test files need: the kit with its weights and pictures, ports of it, and tables."""

from functools import cache
from pathlib import Path

import torch
from PIL import Image
from safetensors.numpy import load_file
from torch.nn import functional as F

from vit_ports.format import read_recording
from vit_ports.mistakes import Port
from vit_ports.towers.siglip2 import SIGLIP2

KIT = Path(__file__).parents[1] / "kit"


@cache
def recording():
    """The kit, which nobody changes."""
    return read_recording(KIT)


@cache
def weights():
    return load_file(KIT / "weights" / "transformers.safetensors")


@cache
def pictures():
    return [Image.open(KIT / one["file"]) for one in recording().about["pictures"]]


def port_with(mistake, wanted):
    """What the port in NumPy with a mistake writes, from the pictures or what is before the mistake.

    Of the wanted pictures; nothing of the others.
    """
    port = Port(SIGLIP2, recording(), weights(), mistake)
    written = []
    for number, right in enumerate(recording().stages):
        made = {}
        if number in wanted:
            made = {**right, **port.made(mistake.start, pictures()[number], right)}
        written.append({stage: made[stage] for stage in recording().order if made})
    return written


def port_with_weights_in(precision):
    """What the port in NumPy writes from the recorded pixels, if its kernels are rounded."""
    rounded = dict(weights())
    for name, kernel in rounded.items():
        tensor = torch.tensor(kernel)
        if precision != "int8":
            tensor = tensor.to(getattr(torch, precision)).float()
        elif tensor.ndim == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127
            tensor = (tensor / step).round() * step
        rounded[name] = tensor.numpy()
    port = Port(SIGLIP2, recording(), rounded)
    return [port.made("patch_embedding", None, right) for right in recording().stages]


def random_table(seed, channels=3, size=(8, 9)):
    """A table (H0, W0, C), float32."""
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


def tokens_of(convention, table, sizes):
    """What a convention makes of it, (tokens, C), float64."""
    return torch.from_numpy(convention.tokens(table.double().numpy(), sizes))


def resized(table, size, mode="bilinear", antialias=True):
    """What PyTorch makes of it, (h, w, C)."""
    channels_first = table.permute(2, 0, 1)[None]
    return F.interpolate(channels_first, size, mode=mode, antialias=antialias)[0].permute(1, 2, 0)


def in_blocks(grid, side):
    """The tokens of a grid (h, w, C), block by block of side x side cells."""
    tokens = []
    for rows in grid.split(side):
        for block in rows.split(side, 1):
            tokens.append(block.flatten(0, 1))
    return torch.cat(tokens)
