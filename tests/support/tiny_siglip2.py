"""A Siglip2 of transformers in two small blocks with random weights, as ``save_pretrained`` writes
it; and pictures. They are no SigLIP-2 weights."""

import numpy as np
import torch
from PIL import Image

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
TIMM_SIZES = dict(
    embed_dim=64, depth=2, num_heads=4, mlp_ratio=2, pos_embed_grid_size=(8, 8)
)  # timm's options for them
TEXT = dict(vocab_size=50, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
FAMILY = "naflexvit_base_patch16_siglip"


def whole_model(num_patches=64):
    """Image and text tower; every parameter is random, biases too."""
    from transformers import Siglip2Config, Siglip2Model

    config = Siglip2Config(
        vision_config=dict(SIZES, num_patches=num_patches), text_config=SIZES | TEXT
    )
    return randomized(Siglip2Model(config))


def tower(num_patches=64, **sizes):
    """The image tower alone; ``sizes`` other than those of ``SIZES``."""
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return randomized(
        Siglip2VisionModel(Siglip2VisionConfig(**SIZES | sizes, num_patches=num_patches))
    )


def randomized(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def smooth_pictures(sizes):
    """Colours that change within a few pixels: what two filters see otherwise."""
    noise = np.random.default_rng(0)
    pictures = []
    for height, width in sizes:
        colours = noise.integers(20, 230, (height // 4, width // 4, 3), np.uint8)
        pictures.append(Image.fromarray(colours).resize((width, height)))
    return pictures
