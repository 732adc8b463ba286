"""Every way of resampling a position table that ``drift`` and ``bench`` compare, each named once.

The names and their words need neither torch nor timm, so that a command's options can be defined from them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

LEARNED, SAMPLED = "_apply_learned_naflex_pos_embed", "_apply_learned_naflex_pos_embed_grid_sample"


@dataclass(frozen=True)
class Contender:
    """What a contender is.

    Attributes:
        words: what it is, for a reader who does not know its name.
        ours: one of this package's strategies.
        method: timm's method that runs, where it is timm's own code.
        mode: timm's setting of the interpolation; None is the model's own.
        antialias: timm's setting of the antialiasing; None is the model's own.
    """

    words: str
    ours: bool = False
    method: str | None = None
    mode: str | None = None
    antialias: bool | None = None


CONTENDERS = {
    "stock": Contender("timm's own loop"),
    "interpolate_cached": Contender("this package, F.interpolate once per grid, kept", ours=True),
    "grid_sample": Contender("this package, timm's grid_sample flag made fast", ours=True),
    "matmul": Contender("this package, sums with resize matrices", ours=True),
    "bilinear": Contender("timm's loop, bilinear with antialias", method=LEARNED, mode="bilinear", antialias=True),
    "bicubic": Contender("timm's loop, bicubic with antialias", method=LEARNED, mode="bicubic", antialias=True),
    "bilinear-no-antialias": Contender(
        "timm's loop, bilinear without antialias", method=LEARNED, mode="bilinear", antialias=False
    ),
    "bicubic-no-antialias": Contender(
        "timm's loop, bicubic without antialias", method=LEARNED, mode="bicubic", antialias=False
    ),
    "timm-flag-bilinear": Contender("timm's grid_sample flag, bilinear", method=SAMPLED, mode="bilinear"),
    "timm-flag-bicubic": Contender("timm's grid_sample flag, bicubic", method=SAMPLED, mode="bicubic"),
    "issue-2514-zeros": Contender("the proposal in timm issue 2514"),
    "issue-2514-border": Contender("the proposal in timm issue 2514, with border padding"),
    "hf-siglip2": Contender("the loop in HF transformers' Siglip2"),
}
NAMES = tuple(CONTENDERS)
OURS = tuple(name for name, contender in CONTENDERS.items() if contender.ours)
OLD_NAMES = {
    "stock-bilinear": "timm-flag-bilinear",
    "stock-bicubic": "timm-flag-bicubic",
    "issue-2514": "issue-2514-zeros",
}


def check_names(names: Iterable[str], valid: Iterable[str] = NAMES) -> list[str]:
    """The contenders' names, each once; a name of an earlier release becomes the present one, with a warning.

    Raises:
        ValueError: a name that is not in ``valid``.
    """
    found, valid = [], tuple(valid)
    for name in names:
        if name in OLD_NAMES:
            warnings.warn(f"the contender {name!r} is now called {OLD_NAMES[name]!r}", FutureWarning, stacklevel=2)
            name = OLD_NAMES[name]
        if name not in valid:
            raise ValueError(f"{name!r} is not a contender; valid: {', '.join(valid)}")
        found.append(name)
    return list(dict.fromkeys(found))


def missing(name: str, embeds: Any) -> str | None:
    """Why a contender cannot run on this NaFlexEmbeds, or would only repeat its own setting; None if it can."""
    contender = CONTENDERS[name]
    if name == "stock" or contender.ours:
        return None
    if embeds.pos_embed_type != "learned":
        return f"it resamples a learned 2-D table; this model's is {embeds.pos_embed_type!r}"
    if contender.antialias is False and not hasattr(embeds, "pos_embed_antialias"):
        return "this timm has no such setting"
    if contender.method is not None:
        own_method = SAMPLED if embeds.pos_embed_use_grid_sample else LEARNED
        options = _options(contender, embeds)
        if contender.method == own_method and all(getattr(embeds, key) == value for key, value in options.items()):
            return "it is the model's own setting, the same as stock"
    if name == "hf-siglip2":
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        try:
            _siglip2_resize()
        except (ImportError, AttributeError) as error:
            return f"this transformers does not have it: {error}"
    return None


@contextmanager
def use(name: str, model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` resamples its position table as the contender does; afterwards it is as it was before.

    Patch kernels and rotary tables stay timm's own, so that only the position embedding differs. The
    contender is then the NaFlexEmbeds' ``_apply_learned_naflex_pos_embed(x, patch_coord)``, which adds in place.

    Args:
        name: one of ``NAMES``.
        model: a NaFlexVit, or a NaFlexEmbeds alone.

    Raises:
        ValueError: no such name, or it cannot run on this model.
    """
    from ..patching.install import enable

    check_names([name])
    embeds: Any = getattr(model, "embeds", model)
    why = missing(name, embeds)
    if why is not None:
        raise ValueError(f"{name!r} cannot be measured: {why}")
    contender = CONTENDERS[name]
    # Attributes of the one instance hide those of timm's class.
    own = {} if contender.ours else {**_options(contender, embeds), **_methods(name, embeds)}
    before = {key: embeds.__dict__[key] for key in own if key in embeds.__dict__}
    with enable(mode="stock", pos_embed=name if contender.ours else "stock", model=model):
        try:
            embeds.__dict__.update(own)
            yield
        finally:
            for key in own:
                embeds.__dict__.pop(key, None)
            embeds.__dict__.update(before)


def _options(contender: Contender, embeds: Any) -> dict[str, Any]:
    """timm's attributes that a contender sets; older timm has no setting of the antialiasing, which is on."""
    wanted = {"pos_embed_interp_mode": contender.mode, "pos_embed_antialias": contender.antialias}
    return {key: value for key, value in wanted.items() if value is not None and hasattr(embeds, key)}


def _methods(name: str, embeds: Any) -> dict[str, Callable[..., Any]]:
    """The function (x, patch_coord) that each of timm's two methods is replaced by."""
    from timm.models.naflexvit import NaFlexEmbeds

    from ..patching.install import original

    method = CONTENDERS[name].method
    if name == "stock" or method is not None:
        return {own: original(NaFlexEmbeds, method or own).__get__(embeds) for own in (LEARNED, SAMPLED)}

    def add(x: Tensor, patch_coord: Tensor) -> None:
        if name == "hf-siglip2":
            added = siglip2(embeds.pos_embed[0], patch_coord)
        else:
            padding = "border" if name.endswith("border") else "zeros"
            added = issue_2514(embeds.pos_embed[0], patch_coord, embeds.pos_embed_interp_mode, padding)
        x.add_(added.to(x.dtype))

    return dict.fromkeys((LEARNED, SAMPLED), add)


def issue_2514(table: Tensor, patch_coord: Tensor, mode: str, padding_mode: str = "zeros") -> Tensor:
    """What timm issue 2514 proposes to add to the tokens.

    Args:
        table: (H0, W0, C), used in float32.
        patch_coord: (B, N, 2) coordinates (y, x).
        mode: "bilinear" or "bicubic".
        padding_mode: of ``F.grid_sample``: what lies outside of the table.

    Returns:
        (B, N, C) float32.
    """
    import torch
    import torch.nn.functional as F

    sizes = patch_coord.amax(1) + 1
    largest = sizes.amax(0)
    # Each sample's grid is the corner of a dense grid, as large as the largest one in the batch. The affine map
    # spreads the table over that corner: it zooms out about the table's centre, then shifts the centre to the corner's.
    zoom = (largest / sizes).flip(1)  # per sample (x, y)
    theta = torch.cat((torch.diag_embed(zoom), zoom[..., None] - 1), -1)
    positions = F.affine_grid(theta, [len(sizes), 1, *largest.tolist()], align_corners=False)
    # One table per sample, sampled at every cell of the dense grid; then each token takes its own cell.
    tables = table.float().permute(2, 0, 1).expand(len(sizes), -1, -1, -1)
    dense = F.grid_sample(tables, positions, mode=mode, padding_mode=padding_mode, align_corners=False)
    sample = torch.arange(len(sizes), device=table.device)[:, None]
    return dense[sample, :, patch_coord[..., 0], patch_coord[..., 1]]


def siglip2(table: Tensor, patch_coord: Tensor) -> Tensor:
    """What HF transformers' Siglip2 adds to the tokens, (B, N, C): its own function, given the table (H0, W0, C)."""
    return _siglip2_resize()(table, patch_coord.amax(1) + 1, max_length=patch_coord.shape[1])


def _siglip2_resize() -> Callable[..., Tensor]:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    return Siglip2VisionEmbeddings.resize_positional_embeddings
