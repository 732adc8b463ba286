"""SigLIP-2 NaFlex weights: loaded as users load them, and the drift of every strategy through the whole tower.

With the real weights where they can be had: from the hub, or from a file,

    pytest tests/models/test_siglip2.py --siglip2-weights FILE [--siglip2-model so400m] [--siglip2-results FILE.json]

or with TIMM_NAFLEX_FAST_SIGLIP2_WEIGHTS=FILE. Everywhere with a stand-in: random weights of the same names and shapes,
from a hub on loopback. What is measured on it says whether the code is right, and nothing about SigLIP-2.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import hub
import pytest
import siglip2_drift
import timm
from safetensors.torch import load_file
from timm.models._hub import has_hf_hub

NAMES = {size: f"naflexvit_{size}_patch16_siglip.v2_webli" for size in ("base", "so400m")}
VARIABLE = "TIMM_NAFLEX_FAST_SIGLIP2_WEIGHTS"
HOW = f"give the weights with --siglip2-weights FILE or {VARIABLE}=FILE (.safetensors), or reach the hub"

pytestmark = pytest.mark.skipif(
    NAMES["base"] not in timm.list_pretrained("naflexvit*"), reason=f"timm {timm.__version__} does not name the weights"
)
needs_client = pytest.mark.skipif(
    not has_hf_hub(), reason=f"timm {timm.__version__} cannot use the huggingface_hub that is installed"
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """scikit-image's photographs, cut to several aspect ratios."""
    data = pytest.importorskip("skimage.data")
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("photos")
    for name in ("astronaut", "coffee", "chelsea"):
        pixels = getattr(data, name)()
        height, width = pixels.shape[:2]
        for cut, (h, w) in {"whole": (1, 1), "wide": (0.4, 1), "tall": (1, 0.3)}.items():
            image.fromarray(pixels[: int(height * h), : int(width * w)]).save(folder / f"{name}_{cut}.png")
    return folder


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """(folder of the hub's repositories, the weights file in it)."""
    root = tmp_path_factory.mktemp("hub")
    file = root / "timm" / NAMES["base"] / "model.safetensors"
    hub.stand_in(NAMES["base"].split(".")[0], file)
    return root, file


def child(*arguments, environment):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_stand_in_has_the_real_names_and_shapes(stand_in):
    """93 million weights, as the hub counts them for this tower; the whole list is timm's, by a strict load."""
    weights = load_file(stand_in[1])
    assert weights["embeds.pos_embed"].shape == (1, 16, 16, 768)
    assert weights["embeds.proj.weight"].shape == (768, 768) and "attn_pool.latent" in weights
    assert not any(name.startswith("head") for name in weights)
    assert sum(value.numel() for value in weights.values()) == pytest.approx(92.9e6, rel=1e-3)


@pytest.mark.slow
@pytest.mark.ran("matmul", "interpolate_cached", "grid_sample")
@needs_client
def test_pretrained_model_comes_through_the_hub_client(stand_in, photos, tmp_path, children):
    """Unpatched timm's create_model(pretrained=True) in a process that knows only the hub on loopback, then drift."""
    root, file = stand_in
    out = tmp_path / "stand_in.json"
    few = tmp_path / "few"
    few.mkdir()
    for name in ("coffee_whole.png", "coffee_wide.png", "chelsea_tall.png"):
        (few / name).write_bytes((photos / name).read_bytes())
    with hub.serve(root) as (address, requests):
        environment = hub.environment(address, tmp_path / "home")
        how = ("--stand-in", "--max-seq-len", 48)
        done = child(siglip2_drift.__file__, NAMES["base"], few, out, *how, environment=environment)
    assert done.returncode == 0 and len(children()) == 1, done.stderr
    resolve = f"/timm/{NAMES['base']}/resolve/main/model.safetensors"
    assert f"HEAD {resolve}" in requests and f"GET {resolve}" in requests
    downloaded = [path for path in (tmp_path / "home").rglob("model.safetensors")]
    assert downloaded and downloaded[0].stat().st_size == file.stat().st_size
    record = json.loads(out.read_text())
    assert record["model"] == NAMES["base"] and record["images"] == 3 and len(record["grids"]) == 3
    assert "stand-in" in record["weights"]
    for strategy, results in record["strategies"].items():
        assert list(results) == ["embeddings", *(f"block {i}" for i in range(12)), "pooled"], strategy
    grid_sample = record["strategies"]["grid_sample"]
    assert all(how["rel_rms"] > 1e-3 for how in grid_sample.values())


@pytest.mark.slow  # in the fast tests: test_unreachable_hub_says_how_to_give_weights
@needs_client
def test_hub_without_the_file_says_how_to_give_weights(tmp_path, photos):
    (tmp_path / "timm" / NAMES["base"]).mkdir(parents=True)
    command = ["-m", "timm_naflex_fast", "drift", "--model", NAMES["base"], "--images", photos]
    with hub.serve(tmp_path) as (address, requests):
        done = child(*command, environment=hub.environment(address, tmp_path / "home"))
    assert requests and done.returncode == 2
    assert "--checkpoint FILE" in done.stderr and "Traceback" not in done.stderr


def test_the_check_notices_what_is_not_exact():
    zero = {"max_abs": 0.0, "rel_rms": 0.0, "cosine_distance": 0.0}
    fine = {name: {"embeddings": zero, "pooled": zero} for name in ("stock", "interpolate_cached", "matmul")}
    siglip2_drift.check(fine, 1.0)
    off = {"max_abs": 1e-3, "rel_rms": 1e-3, "cosine_distance": 1e-6}
    for strategy in fine:
        with pytest.raises(AssertionError):
            siglip2_drift.check(fine | {strategy: {"embeddings": off, "pooled": off}}, 1.0)


def weights_file(request):
    """The file that the command line or the environment names; None where neither does."""
    named = request.config.getoption("siglip2_weights") or os.environ.get(VARIABLE)
    if named and not Path(named).is_file():
        pytest.fail(f"no weights at {named}; {HOW}")
    return named


def reachable(name):
    """Whether the weights are in the client's cache, or the hub answers for them within three seconds."""
    if not has_hf_hub():
        return False
    client = pytest.importorskip("huggingface_hub")
    if client.try_to_load_from_cache(f"timm/{name}", "model.safetensors"):
        return True
    try:
        client.get_hf_file_metadata(client.hf_hub_url(f"timm/{name}", "model.safetensors"), timeout=3)
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.ran("matmul", "interpolate_cached", "grid_sample")
def test_real_weights(request, photos):
    name = NAMES[request.config.getoption("siglip2_model")]
    file = weights_file(request)
    if file is None and not reachable(name):
        pytest.skip(f"no weights of {name}: {HOW}")
    record = siglip2_drift.measure(name, photos, file, max_seq_len=256)
    for strategy, results in record["strategies"].items():
        first, last = results["embeddings"], results["pooled"]
        print(f"{name}, {record['weights']}: {strategy}: embeddings {first}, pooled {last}")
    assert record["strategies"]["grid_sample"]["embeddings"]["rel_rms"] > 0
    if out := request.config.getoption("siglip2_results"):
        Path(out).write_text(json.dumps(record, indent=1) + "\n")
