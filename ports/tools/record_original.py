"""Write ports/kit from SigLIP-2's original implementation, which is unchanged.

Two steps, since the original and this package want environments of their own:

    python ports/tools/record_original.py run BIG_VISION MADE
    python ports/tools/record_original.py write MADE

``run`` needs BIG_VISION, a checkout of google-research/big_vision (commit 0127fb6), Python 3.11 and
jax==0.4.35 jaxlib==0.4.35 flax==0.10.2 tensorflow-cpu==2.21.0 numpy==2.4.6 einops==0.8.2
ml_collections==1.1.0 absl-py==2.5.1 scipy==1.17.1 scikit-image==0.26.0 pillow==13.0.0. It draws the
weights, cuts the pictures, runs all on the CPU, and leaves what it finds in the folder MADE.
``write`` needs this package and transformers. It writes the recording, the weights in three forms, and
lab/results/recordings/jax_float64.json. ports/tools/record_mistakes.py then adds limits and known mistakes.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "ports" / "kit"
FLOAT64 = ROOT / "lab" / "results" / "recordings" / "jax_float64.json"

PATCH, WIDTH, DEPTH, HEADS, TABLE, MOST_PATCHES = 8, 32, 2, 4, 12, 64
SEED = 0
SMALLER = np.float32(0.12)  # times what flax gives, for all weights that add to the tokens
NOISE = 0.2  # standard deviation of what is added to biases and LayerNorms

# Name, photograph of scikit-image, first row and column, height and width; then what its grid shows.
# What known mistakes give is kept for the first picture that shows them: the first has the fewest
# tokens, and shows nearly all.
PICTURES = [
    ("whiskers", "chelsea", (180, 60), (30, 330)),  # wide, longer than the table on one axis
    ("face", "astronaut", (20, 170), (100, 100)),  # square, made smaller
    ("cat", "chelsea", (90, 170), (42, 42)),  # square, made larger
    ("launch", "rocket", (60, 270), (150, 90)),  # tall, shorter than the table on both axes
    ("cup", "coffee", (120, 180), (60, 120)),  # wide, much padding
    ("flag", "astronaut", (0, 20), (135, 45)),  # tall, as long as the table on one axis
    ("rim", "coffee", (150, 10), (7, 560)),  # one row
    ("tower", "rocket", (10, 320), (400, 6)),  # one column
    ("spoon", "coffee", (40, 420), (330, 40)),  # tall, longer than the table on one axis
    ("eye", "chelsea", (105, 165), (13, 15)),  # made five times larger
]
Arrays = dict[str, np.ndarray]


def run(big_vision: Path, made: Path) -> None:
    """Run the original on the pictures and leave all that it gives in ``made``.

    Writes the pictures, weights.npz, stages.npz ("000.pixels" and so on, "table"), and about.json:
    who wrote it, and how far it is from float64.
    """
    sys.path.insert(0, str(big_vision))
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Before TensorFlow: the process dies where TensorFlow's protobuf is the first.
    import jax

    made.mkdir(parents=True, exist_ok=True)
    batch = read(cut_pictures(made))
    lengths = batch["type"].sum(1)  # (B,) tokens that are no padding

    rng = np.random.default_rng(SEED)
    initial = build_tower("float32").init(jax.random.PRNGKey(SEED), as_tuple(batch))["params"]
    weights = changed(initial, rng)
    stages = tower_stages(weights, batch, "float32")

    # What float32 itself moves. JAX computes in float64 only where it is told to.
    with jax.experimental.enable_x64():
        exact = tower_stages(weights, batch, "float64")

    save(made / "weights.npz", flat(weights, "params/img/"))
    tables = {"table": weights["pos_embedding"]}
    save(made / "stages.npz", tables | by_picture(batch, stages, lengths))
    about = {
        "written_by": written_by(big_vision),
        "float64": shares(stages, exact, lengths),
    }
    (made / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def save(file: Path, arrays: dict[str, Any]) -> None:
    """Write arrays under their names as NumPy's .npz."""
    np.savez(file, **arrays)


def cut_pictures(made: Path) -> list[np.ndarray]:
    """Cut the pictures out of photographs, (H, W, 3) bytes, and save them."""
    from PIL import Image
    from skimage import data

    pictures = []
    for name, photograph, (top, left), (height, width) in PICTURES:
        whole = getattr(data, photograph)()
        picture = whole[top : top + height, left : left + width]
        Image.fromarray(picture).save(made / f"{name}.png")
        pictures.append(picture)
    return pictures


def read(pictures: list[np.ndarray]) -> Arrays:
    """The original's own reading of pictures, as a padded batch.

    Returns:
        "patches" (B, N, p * p * 3) float32; "type" (B, N), 0 for padding; "yidx" and "xidx" (B, N).
    """
    import tensorflow as tf
    from big_vision.pp.ops_general import get_value_range
    from big_vision.pp.proj.image_text import ops_naflex

    steps = [
        get_value_range(-1, 1),
        ops_naflex.get_resize_to_sequence(PATCH, MOST_PATCHES),
        ops_naflex.get_patchify(PATCH),
    ]
    batch: dict[str, list[np.ndarray]] = {}
    for picture in pictures:
        values = {"image": tf.constant(picture)}
        for step in steps:
            values = step(values)
        for key, tensor in values["image"].items():
            numbers = tensor.numpy()
            padding = [(0, MOST_PATCHES - len(numbers))] + [(0, 0)] * (numbers.ndim - 1)
            batch.setdefault(key, []).append(np.pad(numbers, padding))
    return {key: np.stack(numbers) for key, numbers in batch.items()}


def build_tower(precision: str) -> Any:
    """The original's image tower, which computes in one precision."""
    from big_vision.models.proj.image_text import naflex_vit

    return naflex_vit.Model(
        width=WIDTH,
        depth=DEPTH,
        mlp_dim=4 * WIDTH,
        num_heads=HEADS,
        pool_type="map",
        nposemb=TABLE,
        dtype_mm=precision,
    )


def as_tuple(batch: Arrays) -> tuple[np.ndarray, ...]:
    """A batch as the original's tower takes it."""
    return batch["patches"], batch["type"], batch["yidx"], batch["xidx"]


def tower_stages(weights: Any, batch: Arrays, precision: str) -> Arrays:
    """What the original's tower gives at each stage, (B, N, C) and (B, D), in float64.

    ``dtype_mm`` alone leaves LayerNorms and sums in float32, so the weights are cast too.
    """
    import jax

    cast = jax.tree.map(lambda numbers: numbers.astype(precision), weights)
    pooled, out = build_tower(precision).apply({"params": cast}, as_tuple(batch))
    stages = {"patch_embedding": out["stem"], "position_embedding": out["with_posemb"]}
    for block in range(DEPTH):
        stages[f"block_{block}"] = out["encoder"][f"block{block:02d}"]["+mlp"]
    stages["norm"] = out["encoded"]
    stages["pooled"] = pooled
    return {name: np.asarray(numbers, np.float64) for name, numbers in stages.items()}


def changed(weights: Any, rng: np.random.Generator) -> Any:
    """Flax's initial weights, changed so that every one of them matters.

    Biases and LayerNorms get noise: flax begins with 0 and 1. What adds to the tokens becomes
    smaller, and so the variance that a LayerNorm sees, beside which its eps then shows.
    """
    result = {}
    for name, value in weights.items():
        if isinstance(value, dict):
            result[name] = changed(value, rng)
        else:
            result[name] = np.array(value)
        if name in ("bias", "scale"):
            noise = NOISE * rng.standard_normal(value.shape)
            result[name] += noise.astype(np.float32)
        elif name == "pos_embedding":
            result[name] *= SMALLER
        elif name in ("embedding", "out", "Dense_1"):
            for own in result[name].values():
                own *= SMALLER
    return result


def shares(ours: Arrays, theirs: Arrays, lengths: np.ndarray) -> dict[str, float]:
    """Of each stage the largest difference, as a share of the picture's largest number."""
    largest = {}
    for name, expected in theirs.items():
        largest[name] = 0.0
        for number, length in enumerate(lengths):
            end = None if name == "pooled" else length
            reference = expected[number][:end]
            off = np.abs(ours[name][number][:end] - reference).max()
            largest[name] = max(largest[name], float(off / np.abs(reference).max()))
    return largest


def flat(tree: Any, prefix: str) -> Arrays:
    """Weights under the names of Google's release."""
    named: Arrays = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            named |= flat(value, f"{prefix}{name}/")
        else:
            named[prefix + name] = value
    return named


def by_picture(batch: Arrays, stages: Arrays, lengths: np.ndarray) -> Arrays:
    """The stages of each picture without padding, under the names of a recording."""
    found = {}
    for number, length in enumerate(lengths):
        last = length - 1
        grid = [batch["yidx"][number, last] + 1, batch["xidx"][number, last] + 1]
        found[f"{number:03}.grid"] = np.array(grid, np.int32)
        found[f"{number:03}.pixels"] = batch["patches"][number, :length]
        for name, numbers in stages.items():
            own = numbers[number]
            if name != "pooled":
                own = own[:length]
            found[f"{number:03}.{name}"] = own.astype(np.float32)
    return found


def written_by(big_vision: Path) -> dict[str, Any]:
    """Which program, with which versions, when and where."""
    git = ["git", "-C", str(big_vision), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    versions = {"big_vision": commit, "python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "tensorflow-cpu", "numpy"):
        versions[name] = version(name)
    return {
        "program": "ports/tools/record_original.py",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})",
    }


def write(made: Path) -> None:
    """Write the recording and the result file from what ``run`` left in ``made``."""
    from PIL import Image

    from vit_ports.format import (
        VERSION,
        Recording,
        write_recording,
    )

    about = json.loads((made / "about.json").read_text(encoding="utf-8"))
    found = dict(np.load(made / "stages.npz"))
    table = found.pop("table")

    pictures = []
    entries = []
    stages: list[Arrays] = []
    for number, (name, *_, size) in enumerate(PICTURES):
        prefix = f"{number:03}."
        own = {key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)}
        stages.append(own)
        pictures.append(Image.open(made / f"{name}.png"))
        file = f"pictures/{number:03}.png"
        grid = own["grid"].tolist()
        entries.append({"file": file, "name": name, "size": list(size), "grid": grid})

    description = {
        "format": "naflex-recording",
        "version": VERSION,
        "written_by": about["written_by"],
        "weights": {
            "words": "random, untrained; kit of timm_naflex_fast",
            "sha256": hashlib.sha256((made / "weights.npz").read_bytes()).hexdigest(),
        },
        "patch_size": PATCH,
        "table_size": [TABLE, TABLE],
        "max_patches": MOST_PATCHES,
        "heads": HEADS,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "filter": "bilinear",
        "pictures": entries,
        "stages": [{"name": name, "limits": {}} for name in stages[0]],
        "mistakes": [],
        "mistakes_tried": 0,
    }
    recording = Recording(description, stages, table, {})
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, KIT.name)
        write_recording(recording, pictures, whole)
        write_weights(made / "weights.npz", whole / "weights")
        shutil.copytree(whole, KIT, dirs_exist_ok=True)

    FLOAT64.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "what": "big_vision's tower in float32 against itself in float64, from the same float32 "
        "pixels: the largest difference, as a share of the picture's largest number",
        "recording": KIT.name,
        "stages": about["float64"],
        "made": about["written_by"],
    }
    FLOAT64.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_weights(original: Path, folder: Path) -> None:
    """The weights in Google's form, timm's and transformers', and transformers' settings."""
    import timm
    from safetensors.torch import save_file
    from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

    from timm_naflex_fast.commands.measure.tower_names import to_transformers

    folder.mkdir()
    shutil.copy(original, folder / "big_vision.npz")

    # timm reads Google's form itself.
    model = timm.create_model(
        "naflexvit_base_patch16_siglip.v2_webli",
        pretrained=False,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        pos_embed_grid_size=(TABLE, TABLE),
    )
    model.load_pretrained(str(original))
    tensors = model.state_dict()
    save_file(tensors, folder / "timm.safetensors")

    config = Siglip2VisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_patches=TABLE * TABLE,
        patch_size=PATCH,
    )
    tower = Siglip2VisionModel(config)
    tower.load_state_dict(to_transformers(tensors))
    tower.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "transformers.safetensors")
    processor = Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=MOST_PATCHES)
    processor.save_pretrained(folder)


def main() -> None:
    """Run one of the two steps."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("run", help="run the original")
    first.add_argument("big_vision", type=Path, help="a checkout of google-research/big_vision")
    first.add_argument("made", type=Path, help="a folder for what it gives")
    second = steps.add_parser("write", help="write the recording from what it gave")
    second.add_argument("made", type=Path, help="the folder of the first step")
    options = parser.parse_args()
    if options.step == "run":
        run(options.big_vision, options.made)
    else:
        write(options.made)


if __name__ == "__main__":
    main()
