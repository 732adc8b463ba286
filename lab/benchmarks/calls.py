"""What one call of the position embedding takes, and what the command takes to start."""

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import timm_naflex_fast
from lab.benchmarks.pos_embed import Row, Workload, ready, served
from timm_naflex_fast.commands.measure.bench.workloads import Grid, coordinates, siglip_grids
from timm_naflex_fast.commands.measure.racing import in_new_processes, race
from timm_naflex_fast.names import BASELINE
from timm_naflex_fast.pos_embed import kept

NAMES = (BASELINE, "matmul", "interpolate_cached")
PACKAGE = str(Path(timm_naflex_fast.__file__).parent)
ROUNDS = 12
STARTS = 11
NEW = [(h, w) for h in range(5, 25) for w in range(5, 25) if h != w and h * w <= 400]
FIVE = [(12, 21), (16, 16), (21, 12), (9, 28), (14, 18)]
SMALL = Workload("16x16 table", siglip_grids(256), (16, 16))
SMALL_CUBIC = SMALL._replace(mode="bicubic")
LARGE = SMALL._replace(table=(64, 64), options={"pos_embed_antialias": False})
LARGE_CUBIC = LARGE._replace(mode="bicubic")


class Case(NamedTuple):
    """Calls of one kind, each with one image.

    Attributes:
        what: its name in the table.
        grids: of the images; those of ``NEW`` come for the first time.
        table: what is resampled.
        channels: of the table.
        trains: whether a call goes backward, too; otherwise the table is frozen.
    """

    what: str
    grids: Sequence[Grid] = NEW
    table: Workload = SMALL
    channels: int = 768
    trains: bool = False


CASES = (
    Case("new grid, 16x16 bicubic, C=192", table=SMALL_CUBIC, channels=192),
    Case("new grid, 16x16 bicubic, C=768", table=SMALL_CUBIC),
    Case("new grid, 16x16 bilinear, C=768"),
    Case("new grid, 64x64 bicubic, not antialiased, C=192", table=LARGE_CUBIC, channels=192),
    Case("new grid, 64x64 bilinear, not antialiased, C=192", table=LARGE, channels=192),
    Case("frozen, 16x16 table, C=768", [(12, 21)] * 50),
    Case("frozen, the table's own grid, C=768", [(16, 16)] * 50),
    Case("train, the table's own grid, C=768", [(16, 16)] * 25, trains=True),
)


def time_case(case: Case, rounds: int) -> dict[str, float]:
    """Milliseconds of each contender for all calls of a case."""
    kept.clear_all()
    batches = []
    for grid in case.grids:
        coord = coordinates([grid])
        batches.append((torch.zeros(1, coord.shape[1], case.channels), coord))

    def ready_all(embeds: Any) -> Callable[[], None]:
        if case.grids is NEW:
            kept.clear_all()
        calls = []
        for x, coord in batches:
            upstream = x if case.trains else None
            calls.append(ready(embeds, x, coord, upstream, values=None))
        return partial(_all_of, calls)

    sides = {}
    with ExitStack() as stack:
        for name in NAMES:
            embeds = case.table.embeds(case.channels)
            stack.enter_context(served(name, embeds))
            sides[name] = partial(ready_all, embeds)
        found = race(sides, rounds)
    return {name: figures["median_ms"] for name, figures in found.items()}


def _all_of(calls: Sequence[Callable[[], None]]) -> None:
    for each in calls:
        each()


def time_cases() -> list[dict[str, float]]:
    """Of each case the milliseconds of each contender."""
    return [time_case(case, ROUNDS) for case in CASES]


def calls() -> Iterator[list[Row]]:
    """Microseconds of a call, with one image: the contenders in turns, in each of five processes.

    "times_faster" is timm's time over the contender's, the median of the processes; "least" and
    "most" are its range.
    """
    processes = in_new_processes({"calls": time_cases})["calls"]
    for case, times in zip(CASES, zip(*processes)):
        found = []
        for name in NAMES:
            ratios = [time[BASELINE] / time[name] for time in times]
            row = dict(
                what=case.what,
                contender=name,
                us=1e3 * statistics.median(time[name] for time in times) / len(case.grids),
                times_faster=statistics.median(ratios),
                least=min(ratios),
                most=max(ratios),
            )
            found.append(row)
        yield found


def entered(work: Callable[[], Any]) -> dict[str, int]:
    """How many code objects of the package a call enters (generators count), in how many files."""
    found = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {"code objects": len(found), "files": len({code.co_filename for code in found})}


def way() -> Iterator[list[Row]]:
    """What a call enters, by timm's own method: of one image with a frozen table, kept before; and
    forward and backward in training, of five grids that came before."""
    counted = []
    for phase, grids in (("frozen", FIVE[:1]), ("train", FIVE)):
        kept.clear_all()
        coord = coordinates(grids)
        x = torch.zeros(*coord.shape[:2], 768)
        upstream = x if phase == "train" else None
        embeds = SMALL.embeds(768)
        with timm_naflex_fast.enable():
            for _ in range(4):
                found = entered(ready(embeds, x, coord, upstream, values=None))
        counted.append({"phase": phase, "grids": len(grids), **found})
    yield counted


def startup() -> Iterator[list[Row]]:
    """CPU time of ``naflex-fast --version``, the median of eleven starts."""
    command = [str(Path(sys.executable).with_name("naflex-fast")), "--version"]
    times = []
    for _ in range(STARTS):
        before = _of_children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(_of_children() - before)
    yield [{"what": "naflex-fast --version", "cpu_ms": 1e3 * statistics.median(times)}]


def _of_children() -> float:
    """The CPU time of all processes that this one started and that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
