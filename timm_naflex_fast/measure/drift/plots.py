"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>; no background."""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture

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
