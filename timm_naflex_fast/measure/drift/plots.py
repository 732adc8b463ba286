"""The report's pictures as matplotlib writes them, as addresses (data:...) for a page's <img>.

They have no background. No pyplot: nothing global changes and no display is needed.
"""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture

INK = "#7d8590"  # a middle tone, readable on light and dark pages
FAINT = "#7d859055"
POINTS = 9  # of all words: 12 pixels
FLOOR = 1e-9  # a difference of nothing on a scale of logarithms
SIDE = 2.9  # inches along the longer side of an image

# The look of each contender, the same in every picture. Outlines, the later ones smaller: where
# marks lie on each other, each is seen.
MARKERS = "os^DvhXP"
TONES = ("#e5534b", "#2da44e", "#c9880a", "#2f81f7", "#d4679c", "#a371f7", "#b0704f", "#1b9aaa")
LOOKS: dict[str, dict[str, Any]] = {}
for number, name in enumerate(CONTENDERS):
    LOOKS[name] = {
        "color": TONES[number],
        "marker": MARKERS[number],
        "markersize": 13 - 1.5 * number,
        "markeredgewidth": 1.5,
        "markerfacecolor": "none",
        "linestyle": "none",
        "label": name,
    }

STYLE: dict[str, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": POINTS,
    "axes.labelsize": POINTS,
    "legend.fontsize": POINTS,
    "xtick.labelsize": POINTS,
    "ytick.labelsize": POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
}


@rc_context(STYLE)
def curves(grids: Sequence[dict[str, Any]], contenders: Iterable[str], width: float) -> Figure:
    """Drift of the embeddings over downsampling, a mark per patch grid; ``width`` in inches.

    timm's own zeros are not drawn.
    """
    shown = [name for name in contenders if name != BASELINE]
    height = 3.6
    if width < 5:  # the names of the contenders take more lines
        height += 0.2 * len(shown)
    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots()
    shrinks = [grid["shrink"] for grid in grids]
    for name in shown:
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, **LOOKS[name])
    axes.set(xlabel="table cells per patch (above 1: shrunk)", ylabel="embeddings off by, RMS (%)")
    figure.legend(loc="outside lower center", ncols=max(1, int(width / 2)))
    return figure


@rc_context(STYLE)
def stages(against: Mapping[str, Any], width: float) -> Figure:
    """Largest difference from another library's pipeline over the stages, a line per way.

    Each is a share of the stage's largest number; what is less than ``FLOOR`` is drawn there.
    """
    figure = Figure((width, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, one in {BASELINE: against, **against["modes"]}.items():
        shares = []
        for stage in one["stages"]:
            shares.append(max(stage["largest"] / (stage["scale"] or 1.0), FLOOR))
        names = [stage["stage"] for stage in one["stages"]]
        axes.plot(names, shares, **{**LOOKS[name], "linestyle": "-", "linewidth": 0.8})
    # Names that would lie on each other are left out.
    every = math.ceil(len(names) * POINTS * 1.3 / 72 / width)  # 72 points are an inch
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.set(yscale="log", ylabel="largest difference / largest number")
    axes.tick_params(axis="x", rotation=90)
    figure.legend(loc="outside upper center", ncols=max(1, int(width / 2)))
    return figure


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first contender shown."""
    largest = 1e-6
    for picture in pictures:
        first = next(iter(picture.maps.values()))
        largest = max(largest, first.max().item())
    return largest


@rc_context(STYLE)
def drift_map(picture: Picture, top: float) -> str:
    """The image as the model sees it, beside it the drift of each patch per contender.

    The colours end at ``top``.
    """
    h, w = next(iter(picture.maps.values())).shape
    panels = 1 + len(picture.maps)
    width = SIDE * max(0.6, min(1, w / h))
    height = SIDE * min(1, h / w) + 0.8  # 0.8 for the title
    figure = Figure((width * panels, height), layout="constrained")
    first, *others = figure.subplots(1, panels, subplot_kw={"xticks": [], "yticks": []})

    first.imshow(picture.pixels.numpy(), cmap="gray")
    first.set_title(f"as the model sees it\n{h}x{w} patches")
    for axes, (name, values) in zip(others, picture.maps.items()):
        colours = axes.imshow(100 * values.numpy(), cmap="viridis", vmin=0, vmax=100 * top)
        axes.set_title(f"{name}\nat most {100 * values.max().item():.2f} %")
    figure.colorbar(
        colours,
        ax=[first, *others],
        shrink=0.9,
        aspect=25,
        extend="max",
        label="difference (%)",
    )
    return address(figure, "webp", pil_kwargs={"quality": 60})


@rc_context({"svg.fonttype": "none"})  # words stay words
def address(figure: Figure, form: str = "svg", **more: Any) -> str:
    """The figure as a file inside an address."""
    file = io.BytesIO()
    figure.savefig(file, format=form, transparent=True, dpi=100, **more)
    content = base64.b64encode(file.getvalue()).decode("ascii")
    kind = "svg+xml" if form == "svg" else form
    return f"data:image/{kind};base64,{content}"
