"""Does an installed timm_naflex_fast work alone, and does it hold what it should?

python lab/tools/smoke.py

It runs under -O too, so nothing here is an assert.
"""

import sys
from importlib import metadata
from typing import Any

import timm
import torch

import timm_naflex_fast

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


def equals_timm(mode: Any) -> bool:
    """Whether the model's output under a mode is timm's own."""
    with timm_naflex_fast.enable(mode):
        got = model(batch)
    return torch.allclose(got, want, rtol=1e-4, atol=1e-5)


for exact in ("matmul", "interpolate_cached"):
    if not equals_timm(exact):
        sys.exit(f"smoke: {exact} differs from timm's own result")
if equals_timm("grid_sample"):
    sys.exit("smoke: grid_sample gives timm's own result, so it has not run")
if timm_naflex_fast.status().replaced:
    sys.exit("smoke: timm is not as it was")

# What the installed package says of itself, and which files it holds.
package = metadata.distribution("timm_naflex_fast")
version = timm_naflex_fast.__version__
if package.version != version:
    sys.exit(f"smoke: the metadata say version {package.version}, the code {version}")
if "naflex-fast" not in package.entry_points.names:
    sys.exit("smoke: the command naflex-fast is missing")
page = package.read_text("METADATA") or ""
if "timm_naflex_fast.enable()" not in page:
    sys.exit("smoke: the metadata do not hold the README")

files = [str(file) for file in package.files or ()]
for ending in ("timm_naflex_fast/py.typed", "licenses/LICENSE", "cli/startup/sitecustomize.py"):
    if not any(file.endswith(ending) for file in files):
        sys.exit(f"smoke: {ending} is not installed")
for file in files:
    folder = file.split("/")[0]
    if folder != "timm_naflex_fast" and ".dist-info" not in folder and folder != "..":
        sys.exit(f"smoke: {file} does not belong into the package")

print(f"smoke: timm_naflex_fast {version} from {timm_naflex_fast.__path__[0]} works")
