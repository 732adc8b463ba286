"""The report's pictures: which images it shows, and all that matplotlib draws, as addresses (data:...) for <img>."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contenders import BASELINE, CONTENDERS

INK, FAINT = "#7d8590", "#7d859055"  # middle tones, readable on light and dark pages
SMALL = 9  # points: 12 pixels
# One colour and one mark for each contender, the later ones smaller: where they lie on each other, each is seen.
LOOKS: dict[str, dict[str, Any]] = {
    name: dict(color=f"C{(number + 7) % 10}", marker=mark, markersize=10 - 0.9 * number, markeredgewidth=0)
    for number, (name, mark) in enumerate(zip(CONTENDERS, "osD^vPX*"))
}
INKED = ("text.color", "axes.edgecolor", "axes.titlecolor", "axes.labelcolor", "xtick.color", "ytick.color")
LOOK: dict[str, Any] = {**dict.fromkeys(INKED, INK), "axes.spines.top": False, "axes.spines.right": False}
LOOK |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.5}


@dataclass(frozen=True)
class Picture:
    """One image and its maps.

    Attributes:
        name: the file's, or its number, and why it was chosen.
        pixels: (height, width, 3), or (height, width) of a gray image; contrast stretched to 0...1.
        maps: per contender (h, w): the length of the token's difference over the RMS length of timm's tokens.
    """

    name: str
    pixels: Tensor
    maps: dict[str, Tensor]


def choose(shares: Sequence[float], shrinks: Sequence[float]) -> dict[int, str]:
    """The images to show, each with the reason: the worst, the median, and the one for which the table shrinks most.

    One that hardly differs is not shown: its map would be empty.

    Args:
        shares: drift of each image, as a share of its embeddings.
        shrinks: table cells per patch, of each image.
    """
    order = sorted(range(len(shares)), key=shares.__getitem__)
    reasons = {order[-1]: f"the worst of {len(order)} images"}
    order = [image for image in order if shares[image] > 1e-2 * shares[order[-1]]] or order[-1:]
    reasons.setdefault(order[(len(order) - 1) // 2], "the median")
    most = max(order, key=shrinks.__getitem__)
    if shrinks[most] > 1:
        reasons.setdefault(most, f"the table shrinks most ({shrinks[most]:.1f} cells per patch)")
    return reasons


def picture(name: str, batch: dict[str, Tensor], maps: dict[str, Tensor], embeds: Any) -> Picture:
    """Put the patches of a batch's one image together again, and its numbers in the maps (1, N) onto the grid."""
    valid = batch["patch_valid"][0]
    y, x = batch["patch_coord"][0][valid].long().cpu().unbind(-1)

    def arranged(values: Tensor) -> Tensor:
        cells = torch.zeros(int(y.max()) + 1, int(x.max()) + 1, *values.shape[2:])
        cells[y, x] = values[0][valid].float().cpu()
        return cells

    patches, size, channels = arranged(batch["patches"]), embeds.patch_size, embeds.in_chans
    if getattr(embeds, "channels_last", True):
        patches = patches.unflatten(2, (*size, channels))
    else:
        patches = patches.unflatten(2, (channels, *size)).movedim(2, -1)
    pixels = patches.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # (height, width, C)
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6)
    shown = pixels[..., :3] if channels >= 3 else pixels[..., 0]
    return Picture(name, shown, {key: arranged(values) for key, values in maps.items()})


def panels(columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and the axes that lie in it side by side; sizes in inches per panel. Save it with ``transparent=True``.

    It uses no pyplot, so nothing global changes and no display is needed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=(width * columns, height), layout="constrained")
        return figure, figure.subplots(1, columns, squeeze=False)[0]


def curves(grids: Sequence[dict[str, Any]], contenders: Iterable[str], width: float) -> Any:
    """A figure, ``width`` inches wide: drift of the embeddings over downsampling, a mark per patch grid.

    timm's own zeros are not drawn.
    """
    figure, (panel,) = panels(1, width, 3.6)
    for name in contenders:
        if name != BASELINE:
            drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
            panel.plot([grid["shrink"] for grid in grids], drift, **LOOKS[name], linestyle="none", label=name)
    panel.set(xlabel="table cells per patch (above 1: shrunk)", ylabel="embeddings off by, RMS (%)")
    if panel.lines:
        figure.legend(loc="outside lower center", ncols=int(width / 2), frameon=False, labelcolor=INK, fontsize=SMALL)
    return figure


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first contender shown."""
    return max(next(iter(one.maps.values())).max().item() for one in pictures) or 1e-6


def drift_map(picture: Picture, top: float) -> str:
    """The image as the model sees it, and the drift of each patch per contender, in colours up to ``top``."""
    h, w = next(iter(picture.maps.values())).shape
    figure, axes = panels(1 + len(picture.maps), 2.9 * max(0.6, min(1, w / h)), 2.9 * min(1, h / w) + 0.8)
    axes[0].imshow(picture.pixels.numpy(), cmap="gray")
    axes[0].set_title(f"as the model sees it\n{h}x{w} patches", fontsize=SMALL)
    for panel, (name, values) in zip(axes[1:], picture.maps.items()):
        mapped = panel.imshow(100 * values.numpy(), cmap="viridis", vmin=0, vmax=100 * top)
        panel.set_title(f"{name}\nat most {100 * values.max().item():.2f} %", fontsize=SMALL)
    for panel in axes:
        panel.set(xticks=[], yticks=[])
        panel.grid(False)
    bar = figure.colorbar(mapped, ax=axes, shrink=0.9, aspect=25, extend="max")
    bar.set_label("difference (%)", color=INK, fontsize=SMALL)
    bar.ax.tick_params(colors=INK, labelsize=SMALL)
    return address(figure, "webp", pil_kwargs={"quality": 60})


def address(figure: Any, form: str = "svg", **more: Any) -> str:
    """The figure as a file inside an address."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # words stay words
        figure.savefig(file, format=form, transparent=True, dpi=100, **more)
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
