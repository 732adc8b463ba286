"""How far each mode moves SigLIP-2's trained tower from timm's own loop.

    SIGLIP2_WEIGHTS=hub uv run pytest tests/siglip2 -n0 -s

fetches timm's weights (375 MB) and prints two tables. SIGLIP2_WEIGHTS=FILE takes a file in timm's or
transformers' form, of the same size; without either the hub's cache is looked into.
SIGLIP2_RESULTS=FILE also writes the figures (docs/json.md, ``survey``). Stand-ins with random
weights are measured without that, and never called SigLIP-2's.
``uv run examples/drift_report.py --model ...`` draws the same figures.
"""

import math
import os
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache

from tests.support.oracles import is_pristine
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import images
from timm_naflex_fast.commands.measure.drift.report import headline, rows
from timm_naflex_fast.commands.measure.drift.survey import is_exact, survey
from timm_naflex_fast.commands.measure.models import fingerprint, load_model
from timm_naflex_fast.commands.measure.output import check_writable, provenance, to_json
from timm_naflex_fast.names import BASELINE, STRATEGY_NAMES
from timm_naflex_fast.pictures import settings_of
from timm_naflex_fast.text_table import table

NAME = "naflexvit_base_patch16_siglip.v2_webli"
KIT = Path(__file__).resolve().parents[2] / "ports" / "kit"
KIT_SIZES = dict(embed_dim=32, depth=2, num_heads=4, patch_size=8, pos_embed_grid_size=(12, 12))
PICTURES = {
    "the kit's ten pictures": partial(images.image_sources, KIT / "pictures"),
    images.PHOTOS_WORDS: images.photos,
}
NO_WEIGHTS = (
    "no SigLIP-2 in the hub's cache: SIGLIP2_WEIGHTS=hub fetches it (375 MB), SIGLIP2_WEIGHTS=FILE "
    "takes timm's or transformers' file"
)


def siglip2():
    results = os.environ.get("SIGLIP2_RESULTS")
    if results:
        check_writable(results)
    chosen = os.environ.get("SIGLIP2_WEIGHTS")
    if chosen == "hub":
        return load_model(NAME)
    chosen = chosen or try_to_load_from_cache(f"timm/{NAME}", "model.safetensors")
    if not chosen and results:
        raise ValueError(f"SIGLIP2_RESULTS takes no stand-ins; {NO_WEIGHTS}")
    if not chosen:
        pytest.skip(NO_WEIGHTS)
    # The kit's tower, or a larger one, is not taken for this one.
    return load_model(NAME, chosen)


def kit():
    model, _ = load_model(NAME, KIT / "weights" / "transformers.safetensors", **KIT_SIZES)
    return model, "a stand-in, not SigLIP-2's: the kit's random weights, 2 blocks of 32 channels"


@pytest.mark.parametrize("load", [siglip2, kit])
def test_drift_from_timms_unpatched_loop(load):
    model, weights = load()
    with enable(BASELINE, model=model):
        assert is_pristine()
    # A square picture gets the table's own grid, any other a grid that is smaller on one axis.
    cells = math.prod(model.embeds.pos_embed.shape[1:3])
    settings = settings_of(model) | {"max_seq_len": str(cells)}
    sha256 = fingerprint(model)
    surveys = {}
    for source, pictures in PICTURES.items():
        with ran(*STRATEGY_NAMES):
            found = survey(model, images.naflex_batches(pictures(), settings, 16, []))
        surveys[source] = found
        print(f"\nDrift from timm's loop, on {source}; weights: {weights}; SHA-256 {sha256[:12]}")
        print(f"{table(rows(found))}\n{headline(found)}")
        drift = found["drift"]
        moves = [f"{drift[name]['embed_rel_rms']:.1e}" for name in ("grid_sample", "matmul")]
        print("tokens, RMS: grid_sample {}, matmul {}".format(*moves))

    results = os.environ.get("SIGLIP2_RESULTS")
    if results and load is siglip2:
        record = {
            "model": NAME,
            "weights": {"words": weights, "sha256": sha256},
            "surveys": surveys,
            "made": provenance("uv run pytest tests/siglip2"),
        }
        Path(results).write_text(to_json(record))
    for found in surveys.values():
        drift = found["drift"]
        assert is_exact(found, "matmul")
        assert drift["interpolate_cached"] == drift[BASELINE]
        assert drift["grid_sample"]["embed_rel_rms"] > 100 * drift["matmul"]["embed_rel_rms"]


def test_stand_ins_are_not_taken_for_siglip2(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("SIGLIP2_WEIGHTS", raising=False)
    monkeypatch.delenv("SIGLIP2_RESULTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="SIGLIP2_WEIGHTS=hub fetches it"):
        siglip2()
    results = tmp_path / "drift.json"
    monkeypatch.setenv("SIGLIP2_RESULTS", str(results))
    with pytest.raises(ValueError, match="SIGLIP2_RESULTS takes no stand-ins; no SigLIP-2 in"):
        siglip2()
    monkeypatch.setenv("SIGLIP2_WEIGHTS", str(KIT / "weights" / "transformers.safetensors"))
    with pytest.raises(
        RuntimeError, match=r"transformers.safetensors cannot be loaded \(.*size mis"
    ):
        siglip2()
    assert not results.exists()
