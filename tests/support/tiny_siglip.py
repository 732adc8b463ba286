"""``naflexvit_test_siglip``, the SigLIP-2 tower's design in two small blocks, so that timm's
factory can make it."""

from timm.models import is_model, register_model
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg, _create_naflexvit

NAME = "naflexvit_test_siglip"


def naflexvit_test_siglip(pretrained: bool = False, **kwargs) -> NaFlexVit:
    """A tower of 32 channels with the attention pooling and the bilinear 16x16 table of
    SigLIP-2."""
    table = dict(global_pool="map", pos_embed_interp_mode="bilinear")
    cfg = NaFlexVitCfg(patch_size=16, embed_dim=32, depth=2, num_heads=2, **table)
    return _create_naflexvit(NAME, pretrained=pretrained, cfg=cfg, **{"num_classes": 0, **kwargs})


if not is_model(NAME):
    register_model(naflexvit_test_siglip)
