"""A recording of a tiny SigLIP-2 in memory, with all known mistakes, and the port that agrees with
it."""

from functools import cache

import numpy as np
import timm
import torch
from PIL import Image
from vit_ports.mistakes import Port, mistakes_of, with_mistakes

from timm_naflex_fast.commands.measure.pipelines import siglip2_weights, timm_source
from timm_naflex_fast.commands.measure.record import make_recording, with_limits

PATCH = 8
LENGTH = 36  # most patches
# (height, width): none fills all patches; the first is nearly square.
SIZES = ((130, 150), (250, 160), (40, 420), (133, 200))


def smooth_pictures(sizes=SIZES):
    """Colours that change within a few pixels: what two filters see otherwise."""
    noise = np.random.default_rng(0)
    pictures = []
    for height, width in sizes:
        colours = noise.integers(20, 230, (height // 4, width // 4, 3), np.uint8)
        pictures.append(Image.fromarray(colours).resize((width, height)))
    return pictures


def tiny_model(**settings):
    """A NaFlexVit of SigLIP-2's design, in which each mistake shows."""
    sizes = dict(embed_dim=32, depth=3, num_heads=4, mlp_ratio=2, patch_size=PATCH)
    table = dict(pos_embed_grid_size=(6, 6), pos_embed_interp_mode="bilinear")
    name = "naflexvit_base_patch16_siglip.v2_webli"
    model = timm.create_model(name, num_classes=0, **{**sizes, **table, **settings}).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        # Tokens begin small, so that LayerNorm's eps shows.
        std = 0.02 if name.startswith("embeds.") else 0.3
        torch.nn.init.normal_(parameter, std=std)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
    return model


def source_of(model):
    """The model's own pipeline, with the filter of training."""
    return timm_source(model, LENGTH, "bilinear")


def recording_of(model, pictures, mistakes=None):
    """A recording, with the numbers of these mistakes, or of all that are known."""
    source = source_of(model)
    names = [f"picture {number}" for number in range(len(pictures))]
    recording = with_limits(make_recording(source, pictures, names, {}), source)
    if mistakes is None:
        mistakes = mistakes_of(len(model.blocks))
    return with_mistakes(recording, siglip2_weights(model), pictures, mistakes)


@cache
def reference():
    """The model, and its recording; nobody changes them."""
    model = tiny_model()
    return model, recording_of(model, smooth_pictures())


def port_with(mistake):
    """What the port in NumPy with a mistake writes, from the pictures or what is before the mistake."""
    model, recording = reference()
    port = Port(recording, siglip2_weights(model), mistake)
    written = []
    for picture, right in zip(smooth_pictures(), recording.stages):
        made = {**right, **port.made(mistake.start, picture, right)}
        written.append({stage: made[stage] for stage in recording.order})
    return written


def random_table(seed, channels=3, size=(8, 9)):
    """A table (H0, W0, C), float32."""
    return torch.randn(*size, channels, generator=torch.Generator().manual_seed(seed))


def tokens_of(convention, table, sizes):
    """What a convention makes of it, (tokens, C), float64."""
    return torch.from_numpy(convention.tokens(table.double().numpy(), sizes))
