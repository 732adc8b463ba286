"""Is an installed timm_naflex_fast whole, alone? python tools/smoke.py; under -O too: nothing here
is an assert."""

import sys

import timm
import torch

import timm_naflex_fast

model = timm.create_model(
    "naflexvit_base_patch16_gap", depth=1, embed_dim=64, num_heads=2, num_classes=5
)
torch.nn.init.normal_(model.embeds.pos_embed)
coord = torch.cartesian_prod(torch.arange(3), torch.arange(8))[None]
batch = {
    "patches": torch.randn(1, 24, 768),
    "patch_coord": coord,
    "patch_valid": torch.ones(1, 24).bool(),
}
want = model(batch)
for mode in ("matmul", "interpolate_cached", "grid_sample"):
    with timm_naflex_fast.enable(mode):
        close = torch.allclose(model(batch), want, rtol=1e-4, atol=1e-5)
    if close != (mode != "grid_sample"):
        sys.exit(f"smoke: {mode} {'equals' if close else 'differs from'} timm's own result")
if timm_naflex_fast.status().replaced:
    sys.exit("smoke: timm is not as it was")
print(
    f"smoke: timm_naflex_fast {timm_naflex_fast.__version__} from {timm_naflex_fast.__path__[0]} works"
)
