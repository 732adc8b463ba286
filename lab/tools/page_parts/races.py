"""The tables of times and of counts. Each function with the name of a section makes its table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.tools.page_parts.results import MODELS, OURS, PLAIN_ADD, measured, rows_of
from timm_naflex_fast.commands.measure.contenders import BASELINE

Race = dict[str, dict[str, Any]]  # rows of a result file by contender
Column = Callable[[Race], str]

FLAG = "timm-flag-bilinear"
STEP = ("workload", "phase", "batch")
RANGE = ("least", "times_faster", "most")
LAUNCH_MS = 0.005  # for each operator on a GPU, as an order of magnitude
GPU_BYTES_A_MS = 3.35e9  # of the memory of an H100


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def races(*names: str, by: Sequence[str] = STEP) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed (the values of ``by``), then by contender."""
    found: dict[tuple[Any, ...], Race] = {}
    for row in rows_of(*names):
        full = {**row.get("about", {}), **row}
        facts = tuple(full[key] for key in by)
        found.setdefault(facts, {})[row["contender"]] = full
    return found


def race_table(names: Sequence[str], by: Sequence[str], columns: Mapping[str, Column]) -> str:
    """A line for each race."""
    lines = []
    for facts, race in races(*names, by=by).items():
        what = ", ".join(str(fact) for fact in facts)
        lines.append([what, *(column(race) for column in columns.values())])
    return measured([", ".join(by), *columns], lines, *names)


def ms(contender: str) -> Column:
    """The column of a contender's times."""
    return lambda race: number(race[contender]["median_ms"])


def ratio(slow: str, fast: str = OURS) -> Column:
    """The column of how many times as long the one takes."""
    return lambda race: number(race[slow]["median_ms"] / race[fast]["median_ms"])


def share(contender: str) -> Column:
    """The column of the embeddings' part of a step."""
    return lambda race: f"{100 * race[contender]['embeds_share'][contender]:.1f} %"


FASTER = {
    "x faster than timm's loop": ratio(BASELINE),
    "x faster than timm's flag, bilinear": ratio(FLAG),
    "time / plain add": ratio(OURS, PLAIN_ADD),
}


def speed() -> str:
    """The position embedding alone, on the two workloads of the page."""
    return race_table(["speed/diverse", "speed/siglip"], STEP, FASTER)


def model() -> str:
    """Steps of whole models."""
    columns = {
        "timm, ms": ms(BASELINE),
        "`matmul`, ms": ms(OURS),
        "times faster": ratio(BASELINE),
        "embeddings' share, timm": share(BASELINE),
        "`matmul`": share(OURS),
    }
    return race_table(MODELS, ("model", *STEP), columns)


def calls() -> str:
    """Calls with one image, and how many times as fast as timm's they are."""
    lines = []
    for (what,), race in races("calls", by=["what"]).items():
        line = [what, number(race[BASELINE]["us"])]
        for name in (OURS, "interpolate_cached"):
            least, times, most = (number(race[name][key]) for key in RANGE)
            line += [number(race[name]["us"]), f"{times} ({least} to {most})"]
        lines.append(line)
    headings = ["one call", "timm, us", "`matmul`, us", "times as fast"]
    headings += ["`interpolate_cached`, us", "times as fast"]
    return measured(headings, lines, "calls")


def exported() -> str:
    """Exported programs in each runtime."""
    columns: dict[str, Column] = {"timm's loop, eager, ms": ms(BASELINE)}
    for name in ("torch.export", "ONNX Runtime", "OpenVINO"):
        columns[name] = ratio(BASELINE, name)
    return race_table(["exported"], ("part", "workload", "batch"), columns)


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
    """What a training step costs on a GPU: counted, and an estimate of the time."""
    lines = []
    for row in rows_of("counts"):
        if row["phase"] != "train":
            continue
        moved = row["read"] + row["written"]
        estimate = row["operators"] * LAUNCH_MS + moved / GPU_BYTES_A_MS
        line = [row["workload"], f"`{row['contender']}`"]
        line += [f"{row['host_waits']:,}", f"{row['operators']:,}"]
        line += [number(moved / 1e9), number(row["peak"] / 1e9)]
        lines.append([*line, number(estimate)])
    headings = ["workload", "mode", "waits", "operators", "moved, GB", "peak, GB", "estimate, ms"]
    return measured(headings, lines, "counts")


def steps() -> str:
    """What is replaced besides the position embedding of timm."""
    parts = {
        "patch_kernels": ("patch kernels", OURS),
        "rope": ("rotary embeddings", "batched"),
        "other_libraries": ("transformers' Siglip2", OURS),
    }
    lines = []
    for name, (what, contender) in parts.items():
        for facts, race in races(name).items():
            step = ", ".join(str(fact) for fact in facts if fact)  # kernels have no batch
            columns = (ms(BASELINE), ms(contender), ratio(BASELINE, contender))
            lines.append([f"{what}, {step}", *(column(race) for column in columns)])
    headings = ["what, workload, phase, batch", "the library, ms", "ours, ms", "times faster"]
    return measured(headings, lines, *parts)
