"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>; no background."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from ..contenders import CONTENDERS
from ..style import COLOURS, INK, panels
from .pictures import Picture
from .report import percent
from .survey import Survey

MARKERS = "osD^vPX*"
RMS = "relative RMS drift (%)"


def curves(survey: Survey) -> str:
    """Drift after each block, over downsampling and over aspect ratio: three panels."""
    figure, axes = panels(1, 3, 4.4, 3.6)
    depth, shrink, aspect = axes.flat
    for name, marker in zip(survey.drift, MARKERS):
        look: dict[str, Any] = dict(color=COLOURS[name], marker=marker, markersize=4.5, linewidth=1.2, alpha=0.85)
        by_depth = [survey.drift[name].embed_rel_rms, *survey.blocks[name]]
        depth.plot(range(len(by_depth)), [100 * value for value in by_depth], **look, label=CONTENDERS[name])
        by_grid = [100 * grid.embed_rel_rms[name] for grid in survey.grids]
        shrink.plot([grid.shrink for grid in survey.grids], by_grid, **{**look, "linestyle": "none"})
        aspect.plot([grid.aspect for grid in survey.grids], by_grid, **{**look, "linestyle": "none"})
    depth.set(title="Patch tokens after each block", xlabel="block (0: the embedding)", ylabel=RMS)
    depth.xaxis.get_major_locator().set_params(integer=True)
    shrink.set(title="Embeddings by downsampling", xlabel="table cells per patch (above 1: shrunk)")
    aspect.set(title="Embeddings by aspect ratio", xlabel="width : height of the patch grid")
    aspect.set_xscale("log", base=2)
    aspect.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}:1" if ratio >= 1 else f"1:{1 / ratio:g}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=INK, fontsize=8)
    return _address(figure, "svg")


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of ``grid_sample``, so that it is seen, or else of all."""
    maps = [one.maps for one in pictures]
    shown = [found["grid_sample"] for found in maps if "grid_sample" in found]
    shown = shown or [map_ for found in maps for map_ in found.values()]
    return max((value for map_ in shown for row in map_ for value in row), default=0.0) or 1e-6


def drift_map(picture: Picture, top: float) -> str:
    """The image as the model sees it, and beside it the drift of each patch per contender, in colours up to ``top``."""
    from PIL import Image

    h, w = picture.grid
    across, down = 2.9 * max(0.6, min(1, w / h)), 2.9 * min(1, h / w)
    figure, axes = panels(1, 1 + len(picture.maps), across, down + 0.8)
    photo, *others = axes.flat
    with Image.open(io.BytesIO(base64.b64decode(picture.jpeg))) as image:
        photo.imshow(image, extent=(0, w, h, 0), cmap="gray")
    photo.set_title(f"as the model sees it\n{h}x{w} patches", color=INK, fontsize=8)
    for panel, (name, values) in zip(others, picture.maps.items()):
        shown = [[100 * value for value in row] for row in values]
        mapped = panel.imshow(shown, extent=(0, w, h, 0), cmap="viridis", vmin=0, vmax=100 * top)
        title = textwrap.fill(CONTENDERS[name].removeprefix("the "), int(9 * across))
        panel.set_title(f"{title}\nat most {percent(max(map(max, values)))}", color=INK, fontsize=8)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
        panel.grid(False)
    if others:
        bar = figure.colorbar(mapped, ax=axes, shrink=0.9, extend="max")
        bar.set_label("difference (%)", color=INK, fontsize=8)
        bar.ax.tick_params(colors=INK, labelsize=8)
    return _address(figure, "webp")


def _address(figure: Any, form: str) -> str:
    """The figure as a file inside an address. The same figure gives the same bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    # Words stay words in an SVG, each with the list of fonts.
    with rc_context({"svg.hashsalt": "drift", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        more: dict[str, Any] = dict(metadata={"Date": None}) if form == "svg" else dict(pil_kwargs={"quality": 60})
        figure.savefig(file, format=form, transparent=True, dpi=100, **more)
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
