"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ..names import STRATEGY_NAMES
from ..patching.install import enable
from .bench.workloads import coordinates
from .checkpoints import read_config
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
    input_trials,
    recorded,
    refer,
)
from .tower_names import to_transformers

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
OUTPUTS = {
    "pooled": "the pooled outputs differ",
    "norm": "nothing is pooled, and the last tokens differ",
}
HOW_TO_BUILD = "pip install -U transformers; config.json must be that of the weights"


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
    from timm.data.naflex_dataset import NaFlexCollator

    prepare = eval_transform(model, max_seq_len, interpolation)
    collate = NaFlexCollator(max_seq_len)

    def read(pictures: Pictures) -> Inputs:
        samples = [(prepare(picture), 0) for picture in pictures]  # it wants a label
        batch, _ = collate(samples)
        grid = batch["patch_coord"].amax(1) + 1
        return Inputs(grid, batch["patches"], batch["patch_valid"])

    last = {"norm": model.norm}
    if model.attn_pool is not None:
        last = {"pooled": model.attn_pool}
    modules = _modules(model.embeds.proj, model.embeds, model.blocks, last)

    def tower(inputs: Inputs) -> Outputs:
        coord = coordinates(inputs.grid.tolist(), inputs.pixels.shape[1])
        batch = {"patches": inputs.pixels, "patch_coord": coord, "patch_valid": inputs.valid}
        with use(contender, model), recorded(modules) as found, torch.inference_mode():
            model(batch)
        return found

    return Pipeline(read, tower)


def _modules(
    projection: nn.Module, embeddings: nn.Module, blocks: Any, last: dict[str, nn.Module]
) -> dict[str, nn.Module]:
    """The modules of a tower by the stages that end with them; ``last``: pooled, or norm."""
    modules = {"patch_embedding": projection, "position_embedding": embeddings, **last}
    return modules | {f"block_{number}": block for number, block in enumerate(blocks)}


def transformers_pipeline(model: Any, processor: Any) -> Pipeline:
    """transformers' own image processor and Siglip2 image tower, in eval mode."""
    core = getattr(model, "vision_model", model)  # older releases wrap the tower once more
    embeddings = core.embeddings
    last = {"norm": core.post_layernorm}
    if hasattr(core, "head"):
        last = {"pooled": core.head}
    modules = _modules(embeddings.patch_embedding, embeddings, core.encoder.layers, last)

    def read(pictures: Pictures) -> Inputs:
        batch = processor(images=list(pictures), return_tensors="pt")
        valid = batch["pixel_attention_mask"].bool()
        return Inputs(batch["spatial_shapes"], batch["pixel_values"], valid)

    def tower(inputs: Inputs) -> Outputs:
        stock = enable("stock", library=LIBRARY)
        with stock, recorded(modules) as found, torch.inference_mode():
            model(
                pixel_values=inputs.pixels,
                pixel_attention_mask=inputs.valid.long(),
                spatial_shapes=inputs.grid,
            )
        return found

    return Pipeline(read, tower)


def build_tower(model: Any, config: Mapping[str, Any]) -> Any:
    """transformers' Siglip2 image tower with the weights of timm's ``model``.

    Args:
        model: a NaFlexVit of SigLIP-2's design.
        config: transformers' settings; what they leave open follows from the model.

    Raises:
        RuntimeError: transformers has no Siglip2, or ``config`` is that of other weights.
        ValueError: the model is no Siglip2 tower; counts and names the tensors.
    """
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
    settings |= config
    settings["vision_use_head"] = "head.probe" in weights
    with load_errors("transformers' tower", HOW_TO_BUILD):
        from transformers import Siglip2VisionConfig, Siglip2VisionModel

        tower = Siglip2VisionModel(Siglip2VisionConfig.from_dict(settings))
        getattr(tower, "vision_model", tower).load_state_dict(weights)
    return tower.eval()


def build_processor(model: Any, max_seq_len: int, folder: str | Path | None = None) -> Any:
    """transformers' image processor; with the settings of ``folder``, where it holds some."""
    from transformers import Siglip2ImageProcessor

    options = dict(patch_size=model.embeds.patch_size[0], max_num_patches=max_seq_len)
    if folder:
        try:
            return Siglip2ImageProcessor.from_pretrained(folder, **options)
        except OSError:  # no image processor was saved there
            pass
    return Siglip2ImageProcessor(**options)


def known_reasons(
    model: Any, ours: Pipeline, theirs: Pipeline, processor: Any, interpolation: str | None = None
) -> list[Trial]:
    """What may be the reason if the two part, each with one thing changed."""
    from PIL.Image import Resampling
    from timm.data import resolve_data_config

    here = resolve_data_config({"interpolation": interpolation}, model=model)["interpolation"]
    there = Resampling(processor.resample).name.lower()
    resized = timm_pipeline(model, processor.max_num_patches, there)

    settings = []
    trained = []
    for name, value in TRAINED.items():
        own = getattr(model.embeds, name, value)  # a timm without the setting computes as trained
        if own != value:
            settings.append(f"{name}={own}")
            trained.append(f"{name}={value}")

    def tower(inputs: Inputs) -> Outputs:
        with patch.dict(model.embeds.__dict__, TRAINED):
            return ours.tower(inputs)

    return [
        Trial(
            f"resize filter: timm resizes pictures by {here}, transformers by {there}",
            f"--interpolation {there}",
            resized,
            theirs,
        ),
        Trial(
            f"table filter: timm resamples the table with {', '.join(settings)}, transformers by "
            "bilinear with antialiasing",
            f"--model-kwargs {' '.join(trained)}",
            ours._replace(tower=tower),
            theirs,
        ),
        *input_trials(ours, theirs),
    ]


def against_transformers(
    model: Any,
    batches: Iterable[Pictures],
    *,
    folder: str | Path | None = None,
    contenders: Sequence[str] = STRATEGY_NAMES,
    max_seq_len: int = 256,
    interpolation: str | None = None,
    same_patches: bool = False,
    advance: Callable[[float], Any] = lambda share: None,
) -> dict[str, Any]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    Args:
        model: a NaFlexVit of SigLIP-2's design in eval mode and float32; transformers' tower gets
            its weights.
        batches: lists of PIL images in RGB.
        folder: where transformers' settings of the tower and of the processor may lie.
        contenders: the modes to measure beside timm's own code.
        max_seq_len: most patches of a picture.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: both towers get transformers' patches.
        advance: called after each pass over a batch, with its share of the batch's work.

    Returns:
        "library", "version", "stage_from", "pictures" (how many); for timm's own code "stages" (a
        line for each, see :class:`Comparison`), "first" (the stage that parts, or None), "reason"
        and "mend" (words where a change of one thing has proved them, or None); under "modes"
        "stages" and "first" of each contender; "verdict", in sentences.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: transformers has no Siglip2, or its settings are those of other weights.
        ValueError: another design.
    """
    config = read_config(Path(folder)) if folder else {}
    processor = build_processor(model, max_seq_len, folder)
    theirs = transformers_pipeline(build_tower(model, config), processor)
    comparisons = {}
    for name in dict.fromkeys([BASELINE, *contenders]):
        ours = timm_pipeline(model, max_seq_len, interpolation, name)
        if same_patches:
            ours = ours._replace(read=theirs.read)
        comparisons[name] = Comparison(ours)
    for pictures in batches:
        reference = refer(theirs, pictures)
        for comparison in comparisons.values():
            comparison.add(reference)
            advance(1 / len(comparisons))

    modes = {}
    for name, comparison in comparisons.items():
        modes[name] = {"stages": comparison.stages(), "first": comparison.first()}
    timms = comparisons[BASELINE]
    trials = known_reasons(model, timms.ours, theirs, processor, interpolation)
    proved = timms.explain(trials)
    found = {
        "library": LIBRARY,
        "version": version(LIBRARY),
        "stage_from": "patches" if same_patches else "pictures",
        "pictures": timms.pictures,
        **modes.pop(BASELINE),
        "reason": proved and proved.reason,
        "mend": proved and proved.mend,
        "modes": modes,
    }
    return found | {"verdict": verdict(found)}


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
    text = f"timm and {library} {_parting(found, found['pictures'])}"
    for part in (found["reason"], found["mend"] and f"{found['mend']} mends it"):
        if part:
            text += f"; {part}"
    text += "."
    for mode, one in found["modes"].items():
        if one["first"] != found["first"]:
            text += f" With {mode} they {_parting(one, found['pictures'])}."
    return text


def _parting(one: Mapping[str, Any], pictures: int) -> str:
    *_, last = one["stages"]
    for stage in one["stages"]:
        if stage["stage"] == one["first"]:
            return (
                f"part at {one['first']}, in {stage['pictures']} of {pictures} pictures (largest "
                f"difference {stage['largest']:.2g})"
            )
    share = last["largest"] / (last["scale"] or 1.0)
    return (
        f"part nowhere on {pictures} pictures: {OUTPUTS[last['stage']]} by {share:.1e} of their "
        "largest number at most"
    )
