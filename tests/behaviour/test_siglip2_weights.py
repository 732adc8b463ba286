"""SigLIP-2 NaFlex weights, loaded as users load them, and the drift of every strategy through the whole tower.

The real ones, where the hub or its cache has them; everywhere a stand-in: random weights of the same names and shapes,
from a hub on loopback. What is measured on it says whether the code is right, and nothing about SigLIP-2.
"""

import json
import subprocess
import sys

import pytest
import timm
from safetensors.torch import load_file
from timm.models._hub import has_hf_hub

from tests.support import hub
from tests.support.running import ran
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.names import STRATEGIES

NAME = "naflexvit_base_patch16_siglip.v2_webli"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NAME not in timm.list_pretrained("naflexvit*"), reason="this timm does not name the weights"),
    pytest.mark.skipif(not has_hf_hub(), reason="this timm cannot use the huggingface_hub that is installed"),
]


def check(file):
    """What `drift --json` wrote: exact strategies move nothing, grid_sample does."""
    found = json.loads(file.read_text())["survey"]["drift"]
    assert found["interpolate_cached"]["embed_max_abs"] == found["interpolate_cached"]["pooled_cosine_distance"] == 0
    assert found["matmul"]["embed_rel_rms"] <= 2e-5 and found["matmul"]["pooled_cosine_distance"] <= 1e-9
    assert found["grid_sample"]["embed_rel_rms"] > 1e-3


def test_pretrained_model_comes_through_the_hub_client(photos, tmp_path, children):
    """``naflex-fast drift --model NAME`` in a process that knows only the hub on loopback."""
    file = tmp_path / "hub" / "timm" / NAME / "model.safetensors"
    hub.stand_in(NAME.split(".")[0], file)
    weights = load_file(file)  # 93 million, as the hub counts them for this tower
    assert weights["embeds.pos_embed"].shape == (1, 16, 16, 768) and "attn_pool.latent" in weights
    assert sum(value.numel() for value in weights.values()) == pytest.approx(92.9e6, rel=1e-3)
    command = ["drift", "--model", NAME, "--images", str(photos), "--max-seq-len", "48", "--contenders", *STRATEGIES]
    command = [sys.executable, "-m", "timm_naflex_fast", *command, "--json", str(tmp_path / "drift.json")]
    with hub.serve(tmp_path / "hub") as (address, requests):
        env = hub.environment(address, tmp_path / "home")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        (calls,) = children()
        assert {("pos_embed", mode) for mode in STRATEGIES} <= set(calls)
        check(tmp_path / "drift.json")
        resolve = f"/timm/{NAME}/resolve/main/model.safetensors"
        assert f"HEAD {resolve}" in requests and f"GET {resolve}" in requests
        file.unlink()
        env = hub.environment(address, tmp_path / "another home")
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 2
        assert "--checkpoint FILE" in done.stderr and "Traceback" not in done.stderr


@ran(*STRATEGIES)
def test_real_weights(photos, tmp_path):
    client = pytest.importorskip("huggingface_hub")
    if not client.try_to_load_from_cache(f"timm/{NAME}", "model.safetensors"):
        try:
            client.get_hf_file_metadata(client.hf_hub_url(f"timm/{NAME}", "model.safetensors"), timeout=3)
        except Exception as error:
            pytest.skip(
                f"no weights of {NAME}: {type(error).__name__}; naflex-fast drift --checkpoint FILE takes a file"
            )
    file = tmp_path / "drift.json"
    command = ["drift", "--model", NAME, "--images", str(photos), "--contenders", *STRATEGIES, "--json", str(file)]
    assert main(command) == 0
    check(file)
