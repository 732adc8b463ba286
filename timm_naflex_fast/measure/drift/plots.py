"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>; no
background.

No pyplot: nothing global changes and no display is needed.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture

MARKERS = "osD^vPX*"
# One colour for each contender in every picture: middle tones, readable on light and dark pages.
INK, FAINT, SMALL = "#7d8590", "#7d859055", 9  # points: 12 pixels
TONES = "#e5534b #2da44e #c9880a #2f81f7 #d4679c #a371f7 #b0704f #1b9aaa #8a9a1b #5a8f7b".split()
# And one mark, the later ones smaller: where they lie on each other, each is seen.
LOOKS: dict[str, dict[str, Any]] = {
    name: dict(color=tone, marker=mark, markersize=10 - 0.9 * number, markeredgewidth=0)
    for number, (name, tone, mark) in enumerate(zip(CONTENDERS, TONES, MARKERS))
}
INKED = (
    "text.color",
    "axes.edgecolor",
    "axes.titlecolor",
    "axes.labelcolor",
    "xtick.color",
    "ytick.color",
)
LOOK: dict[str, Any] = {
    **dict.fromkeys(INKED, INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LOOK |= {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}
LOOK |= dict.fromkeys(
    ("axes.titlesize", "axes.labelsize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"),
    SMALL,
)


@rc_context(LOOK)
def curves(grids: Sequence[dict[str, Any]], contenders: Iterable[str], width: float) -> Figure:
    """A figure, ``width`` inches wide: drift of the embeddings over downsampling, a mark per patch
    grid.

    timm's own zeros are not drawn.
    """
    shown = [name for name in contenders if name != BASELINE]
    figure = Figure((width, 3.6 + 0.2 * len(shown) * (width < 5)), layout="constrained")
    axes = figure.subplots()
    for name in shown:
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(
            [grid["shrink"] for grid in grids], drift, **LOOKS[name], linestyle="none", label=name
        )
    axes.set(xlabel="table cells per patch (above 1: shrunk)", ylabel="embeddings off by, RMS (%)")
    figure.legend(loc="outside lower center", ncols=max(1, int(width / 2)))
    return figure


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first contender shown."""
    return max(next(iter(one.maps.values())).max().item() for one in pictures) or 1e-6


@rc_context(LOOK)
def drift_map(picture: Picture, top: float, stacked: bool = False) -> str:
    """The image as the model sees it, and the drift of each patch per contender, in colours up to
    ``top``.

    They lie beside each other, or one below the other for a narrow screen.
    """
    h, w = next(iter(picture.maps.values())).shape
    across, down, count = (
        2.9 * max(0.6, min(1, w / h)),
        2.9 * min(1, h / w) + 0.8,
        1 + len(picture.maps),
    )
    size = (max(3.1, across), down * count) if stacked else (across * count, down)
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(
        *(count, 1) if stacked else (1, count), subplot_kw=dict(xticks=[], yticks=[])
    )
    axes[0].imshow(picture.pixels.numpy(), cmap="gray")
    axes[0].set_title(f"as the model sees it\n{h}x{w} patches")
    for panel, (name, values) in zip(axes[1:], picture.maps.items()):
        mapped = panel.imshow(100 * values.numpy(), cmap="viridis", vmin=0, vmax=100 * top)
        panel.set_title(f"{name}\nat most {100 * values.max().item():.2f} %")
    side = "bottom" if stacked else "right"
    figure.colorbar(
        mapped, ax=axes, shrink=0.9, aspect=25, extend="max", location=side, label="difference (%)"
    )
    return address(figure, "webp", pil_kwargs={"quality": 60})


@rc_context({"svg.fonttype": "none"})  # words stay words
def address(figure: Figure, form: str = "svg", **more: Any) -> str:
    """The figure as a file inside an address."""
    file = io.BytesIO()
    figure.savefig(file, format=form, transparent=True, dpi=100, **more)
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
