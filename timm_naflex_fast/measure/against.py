"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ..names import STRATEGY_NAMES
from ..patching.install import enable
from .bench.workloads import coordinates
from .checkpoints import to_transformers
from .contenders import BASELINE, use
from .images import eval_transform
from .models import load_errors
from .stages import (
    Comparison,
    Inputs,
    Outputs,
    Pictures,
    Pipeline,
    Trial,
    compare,
    input_trials,
    recorded,
    refer,
)

LIBRARY = "transformers"
LIMITS = (
    "Beyond rounding: another grid; a pixel off by more than one grey level of 255; embeddings by "
    "more than 2e-6 of the stage's largest number, what follows by more than 2e-5. A picture whose "
    "pixels agree goes on with the other library's, so that no later stage counts them again."
)
# How SigLIP-2's table is resampled, in timm's settings.
TRAINED = dict(
    pos_embed_interp_mode="bilinear",
    pos_embed_antialias=True,
    pos_embed_align_corners=False,
    pos_embed_ar_preserving=False,
    pos_embed_use_grid_sample=False,
)
HOW_TO_INSTALL = "--against transformers needs transformers: pip install transformers"


def timm_pipeline(
    model: Any, max_seq_len: int, interpolation: str | None = None, contender: str = BASELINE
) -> Pipeline:
    """timm's own transforms and collation, and a NaFlexVit whose table a contender resamples.

    Args:
        model: a NaFlexVit in eval mode.
        max_seq_len: most patches of a picture.
        interpolation: filter of the resize, in place of the data configuration's.
        contender: one of ``CONTENDERS``.
    """
    return Pipeline(_reader(model, max_seq_len, interpolation), _tower(model, contender))


def _reader(
    model: Any, max_seq_len: int, interpolation: str | None
) -> Callable[[Pictures], Inputs]:
    from timm.data.naflex_dataset import NaFlexCollator

    prepare = eval_transform(model, max_seq_len, interpolation)
    collate = NaFlexCollator(max_seq_len)

    def read(pictures: Pictures) -> Inputs:
        samples = [(prepare(picture), 0) for picture in pictures]  # it wants a label
        batch, _ = collate(samples)
        grid = batch["patch_coord"].amax(1) + 1
        return Inputs(grid, batch["patches"], batch["patch_valid"])

    return read


def _tower(model: Any, contender: str) -> Callable[[Inputs], Outputs]:
    modules = {"patch_embedding": model.embeds.proj, "position_embedding": model.embeds}
    modules |= {f"block_{number}": block for number, block in enumerate(model.blocks)}

    def tower(inputs: Inputs) -> Outputs:
        grids = [(h, w) for h, w in inputs.grid.tolist()]
        coord = coordinates(grids, inputs.pixels.shape[1])
        with use(contender, model), recorded(modules) as found, torch.inference_mode():
            features = model.forward_features(inputs.pixels, coord, inputs.valid)
            if isinstance(features, dict):
                features = features["patches"]
            pooled = model.forward_head(features, patch_valid=inputs.valid, pre_logits=True)
        return found | {"pooled": pooled}

    return tower


def transformers_pipeline(model: Any, processor: Any) -> Pipeline:
    """transformers' own image processor and Siglip2 image tower, in eval mode."""
    core = getattr(model, "vision_model", model)  # older releases wrap the tower once more
    modules = {
        "patch_embedding": core.embeddings.patch_embedding,
        "position_embedding": core.embeddings,
    }
    modules |= {f"block_{number}": block for number, block in enumerate(core.encoder.layers)}

    def read(pictures: Pictures) -> Inputs:
        batch = processor(images=list(pictures), return_tensors="pt")
        valid = batch["pixel_attention_mask"].bool()
        return Inputs(batch["spatial_shapes"], batch["pixel_values"], valid)

    def tower(inputs: Inputs) -> Outputs:
        stock = enable("stock", library=LIBRARY)
        with stock, recorded(modules) as found, torch.inference_mode():
            output = model(
                pixel_values=inputs.pixels,
                pixel_attention_mask=inputs.valid.long(),
                spatial_shapes=inputs.grid,
            )
        return found | {"pooled": output.pooler_output}

    return Pipeline(read, tower)


def build_tower(model: Any, config: Mapping[str, Any] | None = None) -> Any:
    """transformers' Siglip2 image tower with the weights of timm's ``model``.

    Args:
        model: a NaFlexVit of SigLIP-2's design.
        config: transformers' settings; what they leave open follows from the model.

    Raises:
        RuntimeError: transformers is not installed, or has no Siglip2, or ``config`` is that of
            other weights.
        ValueError: the model is no Siglip2 tower; counts and names the tensors.
    """
    try:
        from transformers import Siglip2VisionConfig, Siglip2VisionModel
    except ImportError as error:
        raise RuntimeError(f"{HOW_TO_INSTALL} ({error})") from error
    # A classifier is left out: what it takes is compared, not what it gives.
    own = model.state_dict()
    image_tower = {name: own[name] for name in own if not name.startswith("head.")}
    weights = to_transformers(image_tower)
    settings: dict[str, Any] = dict(
        hidden_size=model.embed_dim,
        intermediate_size=model.blocks[0].mlp.fc1.out_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        num_patches=len(weights["embeddings.position_embedding.weight"]),
        patch_size=model.embeds.patch_size[0],
    )
    settings |= config or {}
    with load_errors("transformers' tower", "config.json must be that of the weights"):
        tower = Siglip2VisionModel(Siglip2VisionConfig.from_dict(settings))
        getattr(tower, "vision_model", tower).load_state_dict(weights)
    return tower.eval()


def build_processor(model: Any, max_seq_len: int, folder: str | Path | None = None) -> Any:
    """transformers' image processor; with the settings of ``folder``, where it holds some."""
    from transformers import Siglip2ImageProcessor

    options = dict(patch_size=model.embeds.patch_size[0], max_num_patches=max_seq_len)
    if folder and _holds_settings(Path(folder)):
        return Siglip2ImageProcessor.from_pretrained(folder, **options)
    return Siglip2ImageProcessor(**options)


def _holds_settings(folder: Path) -> bool:
    """Whether an image processor was saved there: by itself, or as a part of a whole processor."""
    if (folder / "preprocessor_config.json").is_file():
        return True
    whole = folder / "processor_config.json"
    return whole.is_file() and "image_processor" in json.loads(whole.read_text(encoding="utf-8"))


def resize_trial(
    model: Any, ours: Pipeline, max_seq_len: int, interpolation: str | None, theirs: str
) -> Trial:
    """Pictures resized by transformers' filter."""
    from timm.data import resolve_data_config

    here = interpolation or resolve_data_config(model=model)["interpolation"]
    return Trial(
        "pixels",
        f"resize filter: timm resizes pictures by {here}, transformers by {theirs}",
        f"--interpolation {theirs}",
        Pipeline(_reader(model, max_seq_len, theirs), ours.tower),
    )


def table_trials(model: Any, ours: Pipeline, contender: str = BASELINE) -> list[Trial]:
    """The position table resampled as SigLIP-2 was trained, and with rows for columns."""
    embeds = model.embeds
    # An older timm lacks some of these settings.
    here = {name: getattr(embeds, name, TRAINED[name]) for name in TRAINED}
    other = [name for name in TRAINED if here[name] != TRAINED[name]]
    if contender == BASELINE or other:
        reason = f"timm resamples the table by {embeds.pos_embed_interp_mode}"
        for name in other:
            if name != "pos_embed_interp_mode":
                reason += f", {name}={here[name]}"
        settings = [f"{name}={TRAINED[name]}" for name in other]
        mend = f"--model-kwargs {' '.join(settings)}"
    else:
        reason = f"{contender} resamples the table without antialiasing"
        mend = "the mode matmul"
    trained = _inside(_tower(model, BASELINE), lambda: patch.dict(embeds.__dict__, TRAINED))
    transposed = _inside(ours.tower, lambda: _transposed_table(embeds))
    stage = "position_embedding"
    reason = f"table filter: {reason}, transformers by bilinear with antialiasing"
    return [
        Trial(stage, reason, mend, Pipeline(ours.read, trained)),
        Trial(stage, "the table is transposed on one side", "", Pipeline(ours.read, transposed)),
    ]


def _inside(tower: Callable[[Inputs], Outputs], change: Callable[[], Any]) -> Any:
    def changed(inputs: Inputs) -> Outputs:
        with change():
            return tower(inputs)

    return changed


@contextmanager
def _transposed_table(embeds: Any) -> Iterator[None]:
    """Inside, rows of the table are its columns."""
    kept = embeds.pos_embed.data
    embeds.pos_embed.data = kept.transpose(1, 2).contiguous()  # (1, n, n, C)
    try:
        yield
    finally:
        embeds.pos_embed.data = kept


def against_transformers(
    model: Any,
    batches: Iterable[Pictures],
    *,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    contenders: Sequence[str] = STRATEGY_NAMES,
    max_seq_len: int = 256,
    interpolation: str | None = None,
    same_patches: bool = False,
    advance: Callable[[float], Any] = lambda share: None,
) -> dict[str, Any]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    Args:
        model: a NaFlexVit of SigLIP-2's design in eval mode; transformers' tower gets its weights.
        batches: lists of PIL images in RGB.
        config: transformers' settings of the tower.
        folder: where its ``preprocessor_config.json`` or ``processor_config.json`` may lie.
        contenders: the modes to measure beside timm's own code.
        max_seq_len: most patches of a picture.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: both towers get transformers' patches.
        advance: called after each pass over a batch, with its share of the batch's work.

    Returns:
        "library", "version", "stage_from", "pictures" (how many); for timm's own code "stages"
        (fields of :class:`Stage`), "first" (the stage that parts, or None), "reason" and "mend"
        (words where a change of one thing has proved them, or None); under "modes" the same for
        each contender; "verdict", in sentences.

    Raises:
        RuntimeError: transformers is not installed, or ``config`` is that of other weights.
        ValueError: another design, another number type, or no pictures.
    """
    from PIL.Image import Resampling

    if next(model.parameters()).dtype != torch.float32:
        raise ValueError("--against compares in float32; leave --dtype out")
    tower = build_tower(model, config)
    processor = build_processor(model, max_seq_len, folder)
    theirs = transformers_pipeline(tower, processor)
    ours = {}
    for name in dict.fromkeys([BASELINE, *contenders]):
        ours[name] = timm_pipeline(model, max_seq_len, interpolation, name)
    comparisons, count = _compare_all(ours, theirs, batches, same_patches, advance)

    resized_by = Resampling(processor.resample).name.lower()
    modes = {}
    for name, comparison in comparisons.items():
        trials = [
            resize_trial(model, ours[name], max_seq_len, interpolation, resized_by),
            *table_trials(model, ours[name], name),
            *input_trials(ours[name]),
        ]
        trial = comparison.explain(theirs, trials, same_patches)
        modes[name] = {
            "stages": [asdict(stage) for stage in comparison.stages()],
            "first": comparison.first(),
            "reason": trial.reason if trial else None,
            "mend": trial.mend if trial else None,
        }
    about = {
        "library": LIBRARY,
        "version": version(LIBRARY),
        "stage_from": "patches" if same_patches else "pictures",
        "pictures": count,
    }
    found = about | modes.pop(BASELINE) | {"modes": modes}
    return found | {"verdict": verdict(found)}


def _compare_all(
    ours: Mapping[str, Pipeline],
    theirs: Pipeline,
    batches: Iterable[Pictures],
    same_patches: bool,
    advance: Callable[[float], Any],
) -> tuple[dict[str, Comparison], int]:
    """A comparison for each of our pipelines, and the number of pictures."""
    comparisons = {name: Comparison() for name in ours}
    count = 0
    for pictures in batches:
        count += len(pictures)
        reference = refer(theirs, pictures)
        for name, pipeline in ours.items():
            comparisons[name].add(pictures, compare(pipeline, reference, same_patches))
            advance(1 / len(ours))
    if not count:
        raise ValueError("there is no image to measure on")
    return comparisons, count


def stage_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table of stages of timm's own code, as text under its headings."""
    rows = []
    for stage in found["stages"]:
        row = {
            "stage": stage["stage"],
            "largest difference": f"{stage['largest']:.2g}",
            "RMS difference": f"{stage['rms']:.2g}",
            "largest number": f"{stage['scale']:.3g}",
            "pictures beyond rounding": f"{stage['pictures']} of {found['pictures']}",
        }
        rows.append(row)
    return rows


def verdict(found: Mapping[str, Any]) -> str:
    """The answer in sentences: where timm's own code parts from the library, then each mode."""
    library = f"{found['library']} {found['version']}"
    sentences = [f"timm and {library} {_parting(found, found['pictures'])}."]
    for mode, one in found["modes"].items():
        if one["first"] != found["first"]:
            sentences.append(f"With {mode} they {_parting(one, found['pictures'])}.")
    return " ".join(sentences)


def _parting(one: Mapping[str, Any], pictures: int) -> str:
    last = one["stages"][-1]
    if one["first"] is None:
        share = last["largest"] / last["scale"] if last["scale"] else 0.0
        return (
            f"part nowhere on {pictures} pictures: the pooled output differs by {share:.1e} of its "
            "largest number at most"
        )
    place = next(stage for stage in one["stages"] if stage["stage"] == one["first"])
    words = (
        f"part at {one['first']}, in {place['pictures']} of {pictures} pictures (largest "
        f"difference {place['largest']:.2g})"
    )
    if one["reason"]:
        words += f"; {one['reason']}"
    if one["mend"]:
        words += f"; {one['mend']} mends it"
    return words
