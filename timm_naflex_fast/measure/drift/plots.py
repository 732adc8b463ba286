"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>; no background."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture
from .survey import GridDrift

MARKERS = "osD^vPX*"
# One colour per contender: middle tones, readable on light and dark pages.
INK, FAINT = "#7d8590", "#7d859055"
TONES = "#e5534b #2da44e #c9880a #2f81f7 #d4679c #a371f7 #b0704f #1b9aaa #8a9a1b #5a8f7b".split()
COLOURS = dict(zip(CONTENDERS, cycle(TONES)))
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


def curves(grids: Sequence[GridDrift], contenders: Iterable[str], width: float) -> Any:
    """A figure, ``width`` inches wide: drift of the embeddings over downsampling, a mark per patch grid.

    Contenders whose marks would lie on each other have one name together; timm's own zeros are not drawn.
    """
    series: dict[tuple[float, ...], list[str]] = {}
    for name in contenders:
        if name != BASELINE:
            values = tuple(round(100 * grid.embed_rel_rms[name], 2) for grid in grids)
            series.setdefault(values, []).append(name)
    figure, axes = panels(1, 1, width, 3.6)
    for (values, names), marker in zip(series.items(), cycle(MARKERS)):
        look: dict[str, Any] = dict(color=COLOURS[names[0]], marker=marker, markersize=4.5, alpha=0.85)
        axes[0, 0].plot([grid.shrink for grid in grids], values, **look, linestyle="none", label=",\n".join(names))
    axes[0, 0].set(xlabel="table cells per patch (above 1: shrunk)", ylabel="embeddings off by, RMS (%)")
    if series:
        columns = max(1, int(width / 2))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first contender shown."""
    return max(next(iter(one.maps.values())).max().item() for one in pictures) or 1e-6


def drift_map(picture: Picture, top: float) -> str:
    """The image as the model sees it, and beside it the drift of each patch per contender, in colours up to ``top``."""
    h, w = next(iter(picture.maps.values())).shape
    across, down = 2.9 * max(0.6, min(1, w / h)), 2.9 * min(1, h / w)
    figure, axes = panels(1, 1 + len(picture.maps), across, down + 0.8)
    photo, *others = axes.flat
    photo.imshow(picture.pixels.numpy(), cmap="gray")
    photo.set_title(f"as the model sees it\n{h}x{w} patches", fontsize=8)
    for panel, (name, values) in zip(others, picture.maps.items()):
        mapped = panel.imshow(100 * values.numpy(), cmap="viridis", vmin=0, vmax=100 * top)
        panel.set_title(f"{name}\nat most {100 * values.max().item():.2f} %", fontsize=8)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
        panel.grid(False)
    bar = figure.colorbar(mapped, ax=axes, shrink=0.9, extend="max")
    bar.set_label("difference (%)", color=INK, fontsize=8)
    bar.ax.tick_params(colors=INK, labelsize=8)
    return address(figure, "webp", pil_kwargs={"quality": 60})


def address(figure: Any, form: str = "svg", **more: Any) -> str:
    """The figure as a file inside an address."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # words stay words
        figure.savefig(file, format=form, transparent=True, dpi=100, **more)
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
