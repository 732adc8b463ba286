"""The tables of races: RACES names the result files and the columns of each."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from timm_naflex_fast.commands.measure.bench.race import times_faster
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.output import number

from .results import OURS, PLAIN_ADD, Row, measure_again, read, table

Race = dict[str, Row]  # rows by contender
Column = Callable[[Race], Any]


def races(pattern: str, by: Iterable[str]) -> dict[tuple[Any, ...], Race]:
    """The rows of result files by what was timed, and by contender."""
    by_facts: dict[tuple[Any, ...], Race] = {}
    for record in read(pattern):
        for row in record["rows"]:
            name = row["contender"]
            about = row.get("about", {})
            counted = about.get("counted", {}).get(name, {})
            full = {**record, **about, **counted, **row}
            facts = tuple(full[key] for key in by)
            by_facts.setdefault(facts, {})[name] = full
    return by_facts


def ms(contender: str) -> Column:
    """Milliseconds."""
    return lambda race: race[contender]["median_ms"] if contender in race else math.nan


def ratio(slow: str, fast: str = OURS) -> Column:
    """How many times as long the one takes."""
    return lambda race: ms(slow)(race) / ms(fast)(race)


def figure(name: str) -> Column:
    """A figure of a race that has one contender."""
    return lambda race: next(iter(race.values()))[name]


def gigabytes(name: str) -> Column:
    """A number of bytes of a race that has one contender."""
    return lambda race: figure(name)(race) / 1e9


LAUNCH_MS = 0.005  # for each operator, as an order of magnitude
GPU_BYTES_A_MS = 3.35e9  # of the memory of an H100


def gpu_estimate(race: Race) -> float:
    """Milliseconds on a GPU as they follow from the counts alone: nobody has measured them."""
    count = figure("operators")(race)
    moved = figure("read")(race) + figure("written")(race)
    return float(count * LAUNCH_MS + moved / GPU_BYTES_A_MS)


def share(contender: str) -> Column:
    """The embeddings' share of a step."""
    return lambda race: f"{100 * race[contender]['embeds_share'][contender]:.1f} %"


def cell(value: Any) -> str:
    """A value of a column as text; "-" for what was not measured."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


STEP = ("workload", "phase", "batch")
FASTER: dict[str, Column] = {
    "times faster than timm": ratio(BASELINE),
    "than timm's grid_sample": ratio("timm-flag-bilinear"),
    "of the time of one plain add": ratio(OURS, PLAIN_ADD),
}
POSITION: dict[str, Column] = {
    **FASTER,
    "`interpolate_cached` than timm": ratio(BASELINE, "interpolate_cached"),
    "`grid_sample` than timm": ratio(BASELINE, "grid_sample"),
}
SAVED: dict[str, Column] = {
    "timm, ms": ms(BASELINE),
    "`matmul`, ms": ms(OURS),
    "times faster than timm": lambda race: times_faster(race[BASELINE], race[OURS]),
    "embeddings' share, timm": share(BASELINE),
    "`matmul`": share(OURS),
}
COUNTS: dict[str, Column] = {
    "waits for the device": figure("host_waits"),
    "operators": figure("operators"),
    "read, GB": gigabytes("read"),
    "written, GB": gigabytes("written"),
    "peak beyond x, GB": gigabytes("peak"),
    "estimate, ms": gpu_estimate,
}
ROPE: dict[str, Column] = {
    "timm, ms": ms(BASELINE),
    "batched, ms": ms("batched"),
    "times faster": ratio(BASELINE, "batched"),
}
COMPILED: dict[str, Column] = {
    "graphs": figure("graphs"),
    "breaks": figure("breaks"),
    "graphs after the first batch": figure("graphs after the first batch"),
    "first steps, s": figure("first steps, s"),
    "a later step, ms": figure("median_ms"),
}
EXPORTED: dict[str, Column] = {
    "timm's loop, ms": ms(BASELINE),
    "timm's grid_sample": ms("timm-flag-bicubic"),
    "exported, torch.export": ms("torch.export"),
    "exported, AOTInductor": ms("AOTInductor"),
    "exported, ONNX Runtime": ms("ONNX Runtime"),
    "exported, OpenVINO": ms("OpenVINO"),
}
SIGLIP2: dict[str, Column] = {
    "transformers, ms": ms(BASELINE),
    "`interpolate_cached`": ms("interpolate_cached"),
    "`matmul`": ms(OURS),
    "times faster": ratio(BASELINE),
}
LARGE = [
    {"diverse", "train", 512, name} for name in (BASELINE, OURS, f"{OURS}, traceable", PLAIN_ADD)
]


class Section(NamedTuple):
    """A table of races."""

    files: str  # a pattern of result files
    by: tuple[str, ...]  # what tells their races from each other
    columns: dict[str, Column]
    needed: Sequence[set[Any]] = (set(),)  # only races whose ``by`` holds one of these sets


SIGLIP_64 = {"siglip", 64, "float32"}
DIVERSE_64 = {"diverse", 64, "float32"}
SIGLIP_MODEL = {"naflexvit_base_patch16_siglip"}
KERNELS: dict[str, Column] = {"times faster than timm": ratio(BASELINE)}
COMPILED_BY = ("workload", "phase", "contender")
RACES = {
    "speed": Section("speed/*", (*STEP, "dtype"), FASTER, [SIGLIP_64, DIVERSE_64]),
    "position": Section("speed/*", (*STEP, "dtype"), POSITION),
    "model_short": Section("model/*", ("model", *STEP), SAVED, [SIGLIP_MODEL, {64}]),
    "model": Section("model/*", ("model", *STEP), SAVED),
    "counts_short": Section("counts", (*STEP, "contender"), COUNTS, LARGE),
    "counts": Section("counts", (*STEP, "contender"), COUNTS),
    "patch_embed": Section("patch_kernels", ("workload", "phase"), KERNELS),
    "compiled": Section("compiled", COMPILED_BY, COMPILED),
    "exported": Section("exported", ("part", *STEP), EXPORTED),
    "rope": Section("rope", STEP, ROPE),
    "other_libraries": Section("other_libraries", STEP, SIGLIP2),
}


def race_table(name: str) -> str:
    """One of RACES."""
    section = RACES[name]
    lines = []
    for facts, race in races(section.files, section.by).items():
        if not any(needed <= set(facts) for needed in section.needed):
            continue
        what = ", ".join(str(fact) for fact in facts)
        lines.append([what, *(cell(column(race)) for column in section.columns.values())])
    what = ", ".join(section.by).replace("contender", "mode")
    headings = [what, *section.columns]
    records = read(section.files)
    return table(headings, lines, records, measure_again(records))
