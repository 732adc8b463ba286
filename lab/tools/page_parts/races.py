"""The tables of times and of counts. Each function with the name of a section makes its table."""

from collections.abc import Iterator, Sequence
from typing import Any

from lab.benchmarks.pos_embed import PLAIN_ADD
from lab.tools.page_parts.results import MODELS, OURS, measured, rows_of
from timm_naflex_fast.names import BASELINE

STEP = ("workload", "phase", "batch")


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def races(*names: str, by: Sequence[str] = STEP) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each race of some result files what was timed (the values of ``by``), and its rows by
    contender."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows_of(*names):
        full = {**row.get("about", {}), **row}
        what = ", ".join(str(full[key]) for key in by)
        found.setdefault(what, {})[row["contender"]] = full
    yield from found.items()


def ratio(race: dict[str, Any], slow: str, fast: str) -> str:
    """How many times as long the one takes."""
    return number(race[slow]["median_ms"] / race[fast]["median_ms"])


def speed() -> str:
    """The position embedding alone, on the two workloads of the page."""
    names = ("speed/diverse", "speed/siglip")
    lines = []
    for what, race in races(*names):
        line = [what, ratio(race, BASELINE, OURS), ratio(race, "timm-flag-bilinear", OURS)]
        lines.append([*line, ratio(race, OURS, PLAIN_ADD)])
    headings = [", ".join(STEP), "x faster than timm's loop"]
    headings += ["x faster than timm's flag, bilinear", "time / plain add"]
    return measured(headings, lines, *names)


def model() -> str:
    """Steps of whole models."""
    lines = []
    for what, race in races(*MODELS, by=("model", *STEP)):
        line = [what]
        line += [number(race[name]["median_ms"]) for name in (BASELINE, OURS)]
        line.append(ratio(race, BASELINE, OURS))
        lines.append([*line, f"{100 * race[BASELINE]['embeds_share'][BASELINE]:.1f} %"])
    headings = [", ".join(("model", *STEP)), "timm, ms", "`matmul`, ms", "times faster"]
    return measured([*headings, "embeddings' share, timm"], lines, *MODELS)


def calls() -> str:
    """Calls with one image, and how many times as fast as timm's they are."""
    lines = []
    for what, race in races("calls", by=["what"]):
        line = [what, number(race[BASELINE]["us"])]
        for name in (OURS, "interpolate_cached"):
            row = race[name]
            least, times, most = (number(row[key]) for key in ("least", "times_faster", "most"))
            line += [number(row["us"]), f"{times} ({least} to {most})"]
        lines.append(line)
    headings = ["one call", "timm, us", "`matmul`, us", "times as fast"]
    headings += ["`interpolate_cached`, us", "times as fast"]
    return measured(headings, lines, "calls")


def way() -> str:
    """What a call enters."""
    lines = []
    for row in rows_of("way"):
        lines.append([f"{row['phase']}, {row['grids']}", row["code objects"], row["files"]])
    return measured(["phase, grids", "code objects", "files"], lines, "way")


def startup() -> str:
    """The CPU time of a start."""
    lines = [[f"`{row['what']}`", number(row["cpu_ms"])] for row in rows_of("startup")]
    return measured(["command", "CPU time, ms"], lines, "startup")


def counts() -> str:
    """What a training step costs, counted."""
    lines = []
    for row in rows_of("counts"):
        line = [row["workload"], f"`{row['contender']}`"]
        line += [f"{row['host_waits']:,}", f"{row['operators']:,}"]
        lines.append([*line, number(row["moved"] / 1e9), number(row["peak"] / 1e9)])
    headings = ["workload", "mode", "waits", "operators", "moved, GB", "peak, GB"]
    return measured(headings, lines, "counts")


def steps() -> str:
    """What is replaced besides the position embedding of timm."""
    parts = {
        "patch_kernels": ("patch kernels", OURS),
        "rope": ("rotary embeddings", "batched"),
        "other_libraries": ("transformers' Siglip2", OURS),
    }
    lines = []
    for name, (what, ours) in parts.items():
        for step, race in races(name):
            times = [number(race[side]["median_ms"]) for side in (BASELINE, ours)]
            line = [f"{what}, {step.removesuffix(', 0')}", *times]  # kernels have no batch
            lines.append([*line, ratio(race, BASELINE, ours)])
    headings = ["what, workload, phase, batch", "the library, ms", "ours, ms", "times faster"]
    return measured(headings, lines, *parts)
