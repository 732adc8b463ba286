"""The drift of every strategy through the whole SigLIP-2 tower.

On its weights, where the hub or its cache has them; everywhere on a stand-in, random weights of its names and shapes.
What is measured on that says whether the code is right, and nothing about SigLIP-2.
"""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.support.running import ran
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.names import STRATEGY_NAMES

NAME = "naflexvit_base_patch16_siglip.v2_webli"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NAME not in timm.list_pretrained("naflexvit*"), reason="this timm does not name the weights"),
]


@ran(*STRATEGY_NAMES)
def drift(photos, file, *options):
    """Exact strategies move nothing, grid_sample does."""
    command = ["drift", "--model", NAME, "--images", str(photos), "--contenders", *STRATEGY_NAMES, "--json", str(file)]
    assert main([*command, *options]) == 0
    found = json.loads(file.read_text())["survey"]["drift"]
    assert found["interpolate_cached"]["embed_max_abs"] == found["interpolate_cached"]["pooled_cosine_distance"] == 0
    assert found["matmul"]["embed_rel_rms"] <= 2e-5 and found["matmul"]["pooled_cosine_distance"] <= 1e-9
    assert found["grid_sample"]["embed_rel_rms"] > 1e-3


def test_stand_in(photos, tmp_path):
    """Variances are kept from block to block, so that drift goes through the depth as through a trained model."""
    weights = {}
    for name, value in timm.create_model(NAME.split(".")[0], num_classes=0).state_dict().items():
        if name.endswith("bias") or "norm" in name:
            made = torch.full(value.shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            made = (0.3 if name == "embeds.pos_embed" else value.shape[-1] ** -0.5) * torch.randn(value.shape)
        weights[name] = made.half()
    assert weights["embeds.pos_embed"].shape == (1, 16, 16, 768) and "attn_pool.latent" in weights
    assert sum(value.numel() for value in weights.values()) == pytest.approx(92.9e6, rel=1e-3)  # as the hub counts them
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = ["--checkpoint", str(tmp_path / "model.safetensors")]
    drift(photos, tmp_path / "drift.json", "--max-seq-len", "48", *checkpoint)


def test_real_weights(photos, tmp_path):
    client = pytest.importorskip("huggingface_hub")
    if not client.try_to_load_from_cache(f"timm/{NAME}", "model.safetensors"):
        try:
            client.get_hf_file_metadata(client.hf_hub_url(f"timm/{NAME}", "model.safetensors"), timeout=3)
        except Exception as error:
            pytest.skip(f"no weights of {NAME}: {type(error).__name__}; drift --checkpoint FILE takes a file")
    drift(photos, tmp_path / "drift.json")
