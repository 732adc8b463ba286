"""The tables of times and of counts. Each function with the name of a section makes its table."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from timm_naflex_fast.commands.measure.contenders import BASELINE

from .results import OURS, PLAIN_ADD, measure_again, read, table

Race = dict[str, dict[str, Any]]  # rows of a result file by contender
Column = Callable[[Race], str]

FLAG = "timm-flag-bilinear"
STEP = ("workload", "phase", "batch")
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


def races(pattern: str, by: Sequence[str]) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed (the values of ``by``), then by contender."""
    found: dict[tuple[Any, ...], Race] = {}
    for record in read(pattern):
        for row in record["rows"]:
            name = row["contender"]
            about = row.get("about", {})
            counted = about.get("counted", {}).get(name, {})
            full = {**about, **counted, **row}
            facts = tuple(full[key] for key in by)
            found.setdefault(facts, {})[name] = full
    return found


def race_table(
    pattern: str, by: Sequence[str], columns: Mapping[str, Column], needed: Sequence[Any] = ()
) -> str:
    """A line for each race whose facts hold all of ``needed``."""
    lines = []
    for facts, race in races(pattern, by).items():
        if set(needed) <= set(facts):
            what = ", ".join(str(fact) for fact in facts)
            lines.append([what, *(column(race) for column in columns.values())])
    records = read(pattern)
    return table([", ".join(by), *columns], lines, records, measure_again(records))


def milliseconds(race: Race, contender: str) -> float:
    """The median; NaN for a contender that did not take part."""
    return race[contender]["median_ms"] if contender in race else math.nan


def shown(value: float) -> str:
    """A number of a table; "-" for what was not measured."""
    return "-" if math.isnan(value) else number(value)


def ms(contender: str) -> Column:
    """The column of a contender's times."""
    return lambda race: shown(milliseconds(race, contender))


def ratio(slow: str, fast: str = OURS) -> Column:
    """The column of how many times as long the one takes."""
    return lambda race: shown(milliseconds(race, slow) / milliseconds(race, fast))


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
    return race_table("speed/[ds]i*", (*STEP, "dtype"), FASTER, [64, "float32"])


def model() -> str:
    """Steps of whole models."""
    columns = {
        "timm, ms": ms(BASELINE),
        "`matmul`, ms": ms(OURS),
        "times faster": ratio(BASELINE),
        "embeddings' share, timm": share(BASELINE),
        "`matmul`": share(OURS),
    }
    return race_table("model/*", ("model", *STEP), columns)


def counts() -> str:
    """What a training step costs on a GPU: counted, and an estimate of the time."""
    records = read("counts")
    lines = []
    for record in records:
        for row in record["rows"]:
            if row["phase"] != "train":
                continue
            moved = row["read"] + row["written"]
            estimate = row["operators"] * LAUNCH_MS + moved / GPU_BYTES_A_MS
            line = [row["workload"], f"`{row['contender']}`"]
            line += [f"{row['host_waits']:,}", f"{row['operators']:,}"]
            line += [number(moved / 1e9), number(row["peak"] / 1e9)]
            lines.append([*line, number(estimate)])
    headings = ["workload", "mode", "waits", "operators", "moved, GB", "peak, GB", "estimate, ms"]
    return table(headings, lines, records, measure_again(records))


def steps() -> str:
    """What is replaced besides the position embedding of timm."""
    parts = {
        "patch_kernels": ("patch kernels", OURS),
        "rope": ("rotary embeddings", "batched"),
        "other_libraries": ("transformers' Siglip2", OURS),
    }
    lines = []
    records = []
    for name, (what, contender) in parts.items():
        records += read(name)
        for facts, race in races(name, STEP).items():
            step = ", ".join(str(fact) for fact in facts if fact)  # kernels have no batch
            columns = (ms(BASELINE), ms(contender), ratio(BASELINE, contender))
            lines.append([f"{what}, {step}", *(column(race) for column in columns)])
    headings = ["what, workload, phase, batch", "the library, ms", "ours, ms", "times faster"]
    return table(headings, lines, records, measure_again(records))
