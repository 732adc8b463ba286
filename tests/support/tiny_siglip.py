"""``naflexvit_test_siglip``, the SigLIP-2 tower's design in two small blocks, so that timm's factory can make it.

As a script it runs siglip2_embed.py with that model known, and kills itself in the middle where DIE_AT says so.
"""

import os
import signal
import sys

from timm.models import is_model, register_model
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg, _create_naflexvit

NAME = "naflexvit_test_siglip"


def naflexvit_test_siglip(pretrained: bool = False, **kwargs) -> NaFlexVit:
    """A tower of 32 channels with the attention pooling and the bilinear 16x16 table of SigLIP-2."""
    cfg = NaFlexVitCfg(
        patch_size=16, embed_dim=32, depth=2, num_heads=2, global_pool="map", pos_embed_interp_mode="bilinear"
    )
    return _create_naflexvit("naflexvit_test_siglip", pretrained=pretrained, cfg=cfg, **{"num_classes": 0, **kwargs})


if not is_model(NAME):
    register_model(naflexvit_test_siglip)


if __name__ == "__main__":
    import siglip2_embed

    embed, left = siglip2_embed.embed, int(os.environ["DIE_AT"])

    def mortal(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return embed(*arguments)

    siglip2_embed.embed = mortal
    sys.exit(siglip2_embed.main())
