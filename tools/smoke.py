"""Does an installed timm_naflex_fast work alone? python tools/smoke.py

It runs under -O too, so nothing here is an assert.
"""

import sys
from importlib.metadata import distribution

import timm
import torch

import timm_naflex_fast
from timm_naflex_fast.names import StrategyName

EXACT: tuple[StrategyName, ...] = ("matmul", "interpolate_cached")

model = timm.create_model(
    "naflexvit_base_patch16_gap", depth=1, embed_dim=64, num_heads=2, num_classes=5
)
torch.nn.init.normal_(model.embeds.pos_embed)
coord = torch.cartesian_prod(torch.arange(3), torch.arange(8))[None]  # (1, 24, 2)
batch = {
    "patches": torch.randn(1, 24, 768),
    "patch_coord": coord,
    "patch_valid": torch.ones(1, 24).bool(),
}
want = model(batch)


def equals_timm(mode: StrategyName) -> bool:
    """Whether the model's output under a mode is timm's own."""
    with timm_naflex_fast.enable(mode):
        got = model(batch)
    return torch.allclose(got, want, rtol=1e-4, atol=1e-5)


for exact in EXACT:
    if not equals_timm(exact):
        sys.exit(f"smoke: {exact} differs from timm's own result")
if equals_timm("grid_sample"):
    sys.exit("smoke: grid_sample gives timm's own result, so it has not run")
if timm_naflex_fast.status().replaced:
    sys.exit("smoke: timm is not as it was")

version = timm_naflex_fast.__version__

# What the wheel says of itself, and what lies in it.
wheel = distribution("timm_naflex_fast")
files = {str(file) for file in wheel.files or []}
folders = {file.split("/")[0] for file in files}
checks = {
    "version": wheel.version == version,
    "description": bool(wheel.metadata.get_payload()),
    "licence": wheel.metadata["License-Expression"] == "Apache-2.0",
    "licence's text": any(file.endswith("licenses/LICENSE") for file in files),
    "naflex-fast": "naflex-fast" in wheel.entry_points.names,
    "py.typed": "timm_naflex_fast/py.typed" in files,
    "no other folder": folders.isdisjoint({"tests", "recordings", "results", "docs", "tools"}),
}
for name, right in checks.items():
    if not right:
        sys.exit(f"smoke: the wheel is wrong in: {name}")

print(f"smoke: timm_naflex_fast {version} from {timm_naflex_fast.__path__[0]} works")
