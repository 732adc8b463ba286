"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>; no background."""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture

MARKERS = "osD^vPX*"
# One colour for each contender in every picture: middle tones, readable on light and dark pages.
INK, FAINT = "#7d8590", "#7d859055"
SMALL = 9  # points: 12 pixels
TONES = "#e5534b #2da44e #c9880a #2f81f7 #d4679c #a371f7 #b0704f #1b9aaa #8a9a1b #5a8f7b".split()
# And one mark, the later ones smaller: where they lie on each other, each is seen.
LOOKS: dict[str, dict[str, Any]] = {
    name: dict(color=tone, marker=mark, markersize=10 - 0.9 * number, markeredgewidth=0)
    for number, (name, tone, mark) in enumerate(zip(CONTENDERS, TONES, MARKERS))
}
INKED = ("text.color", "axes.edgecolor", "axes.titlecolor", "axes.labelcolor", "xtick.color", "ytick.color")
BARE = ("axes.spines.top", "axes.spines.right")
LOOK: dict[str, Any] = {**dict.fromkeys(INKED, INK), **dict.fromkeys(BARE, False)}
LOOK |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.5}


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its (rows, columns) array of axes; sizes in inches per panel. Save it with ``transparent=True``.

    It uses no pyplot, so nothing global changes and no display is needed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)


def curves(grids: Sequence[dict[str, Any]], contenders: Iterable[str], width: float) -> Any:
    """A figure, ``width`` inches wide: drift of the embeddings over downsampling, a mark per patch grid.

    timm's own zeros are not drawn.
    """
    shown = [name for name in contenders if name != BASELINE]
    figure, axes = panels(1, 1, width, 3.6 + 0.2 * len(shown) * (width < 5))
    for name in shown:
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes[0, 0].plot([grid["shrink"] for grid in grids], drift, **LOOKS[name], linestyle="none", label=name)
    axes[0, 0].set(xlabel="table cells per patch (above 1: shrunk)", ylabel="embeddings off by, RMS (%)")
    if shown:
        columns = max(1, int(width / 2))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK, fontsize=SMALL)
    return figure


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first contender shown."""
    return max(next(iter(one.maps.values())).max().item() for one in pictures) or 1e-6


def drift_map(picture: Picture, top: float, stacked: bool = False) -> str:
    """The image as the model sees it, and the drift of each patch per contender, in colours up to ``top``.

    They lie beside each other, or one below the other for a narrow screen.
    """
    h, w = next(iter(picture.maps.values())).shape
    across, down = 2.9 * max(0.6, min(1, w / h)), 2.9 * min(1, h / w)
    count = 1 + len(picture.maps)
    rows, columns = (count, 1) if stacked else (1, count)
    figure, axes = panels(rows, columns, max(3.1, across) if stacked else across, down + 0.8)
    photo, *others = axes.flat
    photo.imshow(picture.pixels.numpy(), cmap="gray")
    photo.set_title(f"as the model sees it\n{h}x{w} patches", fontsize=SMALL)
    for panel, (name, values) in zip(others, picture.maps.items()):
        mapped = panel.imshow(100 * values.numpy(), cmap="viridis", vmin=0, vmax=100 * top)
        panel.set_title(f"{name}\nat most {100 * values.max().item():.2f} %", fontsize=SMALL)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
        panel.grid(False)
    side = "bottom" if stacked else "right"
    bar = figure.colorbar(mapped, ax=axes, shrink=0.9, aspect=25, extend="max", location=side)
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
