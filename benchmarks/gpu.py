"""A GPU day: everything that only a GPU can answer, in the order of its worth, in two commands of 10 minutes at most.

python benchmarks/gpu.py first --out DIR     # machine correct waits graphs compiled sanitize times
python benchmarks/gpu.py second --out DIR    # kernels model inductor stock tests
python benchmarks/gpu.py correct times --out DIR                # parts by name
python benchmarks/gpu.py first second --out DIR --device cpu    # rehearsal, Triton's kernels in its interpreter

| part | what it asks |
| --- | --- |
| machine | versions; bytes a second of a copy |
| correct | are the kernels right: all workloads and dtypes against the CPU, on memory full of NaN, the same each time |
| waits, graphs, compiled | the tests of tests/behaviour/test_cuda.py whose names hold these words |
| sanitize | does compute-sanitizer find anything, where it is |
| times | a step by workload, dtype and phase, against one plain add and timm's flag; ``stock``: against timm's loop |
| kernels | the time of each kernel; what ``ncu`` counts, where it is |
| model | a whole training step with the optimizer, 64 and 256 images |
| inductor | training batches of 8 images through a compiled model |
| tests | the rest of test_cuda.py, test_triton.py, and what contract/ asks of Triton |

Each part is a process group of its own, ended with its children at its limit. What is found is a line of JSON in
DIR/day.jsonl at once, so nothing is lost; DIR/day.log holds what was printed. times, stock and model are ``naflex-fast
bench``, which writes DIR/PART.json after each race; times and stock become DIR/step.json. Copy DIR to results/gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
import torch  # noqa: E402
from graphs import inductor as compiled_steps  # noqa: E402
from measure import bench  # noqa: E402

from timm_naflex_fast.backends import eager, triton  # noqa: E402
from timm_naflex_fast.measure.bench.race import stopwatch  # noqa: E402
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates  # noqa: E402
from timm_naflex_fast.measure.output import provenance, write_json  # noqa: E402
from timm_naflex_fast.resampling.matrices import ResizeSpec  # noqa: E402
from timm_naflex_fast.strategies import STRATEGIES  # noqa: E402

# Seconds that each part may take; the last two parts are for the rehearsal.
FIRST = dict(machine=40, correct=170, waits=50, graphs=40, compiled=80, sanitize=60, times=120)
SECOND = dict(kernels=90, model=80, inductor=90, stock=120, tests=180)
LIMITS = {**FIRST, **SECOND, "hang": 20, "crash": 30}
METRICS = "gpu__time_duration.sum,dram__bytes.sum,lts__t_bytes.sum,sm__inst_issued.avg.pct_of_peak_sustained_active"
POSITION = "--batch 512 --dtype float32 bfloat16 --phase infer train --budget 1 --contenders"
BENCH = {
    "times": f"{POSITION} plain-add matmul timm-flag-bilinear --workload siglip diverse radio single imagenet",
    "stock": f"{POSITION} stock interpolate_cached --workload siglip diverse",
    "model": "--model naflexvit_base_patch16_siglip --phase train --batch 64 256",
}
NCU = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", "regex:_kernel$", "--metrics", METRICS]
Found = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Found]]]


class Day:
    """Where figures go, and on what they are taken: ``device``, C channels, the dtypes."""

    def __init__(self, out: Path, device: str) -> None:
        self.out, self.device, self.gpu = out, device, device != "cpu"
        self.channels = 768 if self.gpu else 16
        self.dtypes = [torch.float32, torch.bfloat16, torch.float16] if self.gpu else [torch.float32]

    def tell(self, part: str, **facts: Any) -> None:
        """Put down one line, at once."""
        with open(self.out / "day.jsonl", "a") as file:
            file.write(json.dumps({"part": part, **facts}) + "\n")
        print(part, facts, flush=True)

    def draw(self, name: str, batch: int) -> tuple[Any, Any, Any]:
        """A workload, how it is resampled, and the coordinates of a batch; few small grids in the rehearsal."""
        like = WORKLOADS[name]
        grids = like.grids(batch) if self.gpu else [(3, 5), (5, 2)]
        return like, ResizeSpec(like.mode, **like.more), coordinates(grids)

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """Normal numbers, drawn on the device: a CPU would take seconds."""
        return torch.randn(*shape, device=self.device, dtype=dtype)


def machine(day: Day) -> Cases:
    """Versions and the ceilings."""
    n = 2**28 if day.gpu else 2**18
    x, ready = day.random(2, n)
    yield "versions", partial(provenance, "python benchmarks/gpu.py machine --out DIR")
    timed = stopwatch(day.device)
    yield "copy", lambda: {"tb_s": 8e-12 * n / statistics.median(timed(lambda: x.copy_(ready)) for _ in range(10))}


def correct(day: Day) -> Cases:
    """The kernels against the CPU's form."""
    names = ("siglip", "diverse", "radio", "extreme", "imagenet", "single") if day.gpu else ("siglip",)
    orders = ("row-major", "shuffled", "dropped") if day.gpu else ("row-major",)
    for name, order, dtype in product(names, orders, day.dtypes):
        like, spec, coord = day.draw(name, 12)
        if order != "row-major":
            coord[::2] = coord[::2, torch.randperm(coord.shape[1], generator=torch.Generator().manual_seed(5))]
            coord = coord[:, : coord.shape[1] * (4 if order == "shuffled" else 3) // 4].contiguous()
        shape = *like.table, day.channels if order == "row-major" else 136
        yield f"{name}, {order}, {dtype}", partial(compare, day, shape, spec, coord, dtype)


def compare(day: Day, shape: tuple[int, ...], spec: Any, coord: Any, dtype: Any) -> Found:
    """Forward, in place and as a copy, and gradient; three times over: a result that moves is a race."""
    torch.manual_seed(1)
    table, x = torch.randn(shape), torch.randn(*coord.shape[:2], shape[2]).to(dtype)
    want, want_grad = x.clone(), eager.gradient(x, shape, coord, spec)
    eager.add(want, (table,), coord, spec, STRATEGIES["matmul"])
    given, where, there = (tensor.to(day.device) for tensor in (x, coord, table))
    runs = []
    for _ in range(3 if day.gpu else 1):
        if day.gpu:
            del [torch.full((2**26,), torch.nan, device=day.device) for _ in range(4)][:]
        facts = triton.read_batch(where, given.device, table.shape, spec)
        out, other = given.clone(), torch.full_like(given, torch.nan)
        triton.launch_forward(out, out, there, facts, spec)
        triton.launch_forward(given, other, there, facts, spec)
        runs.append([t.cpu() for t in (out, other, triton.table_grad(given, table.shape, facts, spec))])
    out, other, grad = runs[0]
    apart, single = (out.float() - want.float()).abs(), dtype == torch.float32
    found = dict(most=apart.max().item(), differ=(apart > 0).float().mean().item())
    found["gradient"] = ((grad - want_grad).abs().max() / want_grad.abs().max()).item()
    assert torch.equal(out, other), "in place and as a copy differ"
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0])), "two runs differ"
    assert found["most"] <= (4e-6 if single else 8 * torch.finfo(dtype).eps) and found["gradient"] <= 1e-5, found
    assert single or found["differ"] <= 0.01, found
    return found


def run(command: list[str], *right: int, **settings: str) -> Found:
    """Run a command, which must end with one of these exit statuses, or 0; what it prints goes to DIR/day.log."""
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}).returncode
    assert status in (0, *right), f"exit status {status}: see day.log"
    return {}


def pytest(day: Day, part: str) -> Cases:
    """Tests that need a GPU; in the rehearsal one that does not."""
    words = {"waits": "waits", "graphs": "cuda_graph", "compiled": "inductor"}
    chosen = words.get(part, "not waits and not cuda_graph and not inductor" if day.gpu else "out_of_place")
    files = ["tests/behaviour/test_cuda.py"]
    if part == "tests":
        files += ["tests/backends/test_triton.py", "tests/contract/test_backends.py"]
        chosen += " and (cuda or triton)"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", "-m", "slow or not slow"]
    yield "tests", partial(run, [*command, "-n", "4" if day.gpu else "0", "-k", chosen, *files], 5)  # 5: there is none


def small_run(day: Day) -> Cases:
    """Every kernel once: tall, whole, shuffled, cut; other tools watch it."""
    coord = coordinates([(3, 4), (70, 1), (9, 12), (5, 5)] if day.gpu else [(3, 4), (5, 2), (4, 4), (5, 5)])
    coord[3, :6] = coord[3, :6].flip(0)
    yield from ((str(t), partial(compare, day, (32, 32, day.channels), ResizeSpec(), coord, t)) for t in day.dtypes[:2])


def sanitize(day: Day) -> Cases:
    """Accesses out of bounds, races in shared memory, and reads of what nobody wrote; none of it in the rehearsal."""
    for tool in ("memcheck", "racecheck", "initcheck")[: 3 if day.gpu else 1]:
        command = ["compute-sanitizer", "--error-exitcode", "9", "--tool", tool] if day.gpu else []
        yield tool, partial(run, [*command, *itself(day, "small_run")], PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def races(day: Day, part: str) -> Cases:
    """`naflex-fast bench`, with its own options; tiny sizes in the rehearsal."""
    options = f"{BENCH[part]} --device {day.device}"
    yield "races", lambda: {"rows": len(bench(options, day.out / f"{part}.json", not day.gpu))}


def kernels(day: Day) -> Cases:
    """The time of each kernel."""
    for name, dtype in product(("siglip", "diverse", "radio", "single") if day.gpu else ("siglip",), day.dtypes[:2]):
        yield f"{name}, {dtype}", partial(kernel_times, day, name, dtype)
    if day.gpu:
        yield "ncu", partial(run, [*NCU, *itself(day, "small_run")])


def kernel_times(day: Day, name: str, dtype: Any) -> Found:
    """Milliseconds of each kernel of a step; nothing in the rehearsal."""
    like, spec, coord = day.draw(name, 512)
    coord, table = coord.to(day.device), day.random(*like.table, day.channels)
    x = day.random(*coord.shape[:2], day.channels, dtype=dtype)

    def step() -> None:
        facts = triton.read_batch(coord, x.device, table.shape, spec)
        triton.launch_forward(x, x, table, facts, spec)
        triton.table_grad(x, table.shape, facts, spec)

    step()
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CUDA if day.gpu else kind.CPU]) as profile:
        for _ in range(5 * day.gpu):
            step()
        day.gpu and torch.cuda.synchronize()
    return dict(ms={row.key[:60]: row.self_device_time_total / 5e3 for row in profile.key_averages()})


def inductor(day: Day) -> Cases:
    """Steps of a compiled model."""
    for (row,) in compiled_steps(not day.gpu, day.device):
        yield row["contender"], partial(dict, row)


def hang(day: Day) -> Cases:
    """A part that never ends, and has a child."""
    child = subprocess.Popen(["sleep", "1000"])
    yield "child", lambda: {"pid": child.pid}
    child.wait()


def crash(day: Day) -> Cases:
    """A part that ends as a broken kernel may end it."""
    yield "before", dict
    os.kill(os.getpid(), signal.SIGSEGV)


def itself(day: Day, part: str) -> list[str]:
    """The command that runs one part in its own process."""
    return [sys.executable, __file__, part, "--out", str(day.out), "--device", day.device, "--inside"]


def run_inside(day: Day, part: str) -> int:
    """Put down what each case of a part finds, or why it failed; 1 if one did."""
    wrong, cases = 0, globals().get(part, partial(races if part in BENCH else pytest, part=part))
    for case, work in cases(day):
        try:
            day.tell(part, case=case, ok=True, **work())
        except Exception:
            day.tell(part, case=case, ok=False, error=traceback.format_exc()[-1500:])
            wrong = 1
    return wrong


def run_part(day: Day, part: str, limit: float) -> None:
    """Run a part in a process group of its own, and end the group with all its children."""
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({} if day.gpu else {"TRITON_INTERPRET": "1"})}
    with open(day.out / "day.log", "a") as log:
        child = subprocess.Popen(itself(day, part), stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            ended: Any = child.wait(limit)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    day.tell(part, ended=ended, seconds=round(time.monotonic() - start))


def main() -> int:
    """Run the parts that were asked for, each in its own process, and write the times as a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["first", "second", *LIMITS, "small_run"], metavar="PART")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    day = Day(o.out.resolve(), o.device)
    if o.inside:
        if not day.gpu:  # the interpreter takes programs one after another
            triton.LENGTHS = (128, 2048, 4095)
        return run_inside(day, o.parts[0])
    begin, slower = time.monotonic(), 1 if day.gpu else 10
    for part in (part for name in o.parts for part in {"first": FIRST, "second": SECOND}.get(name, [name])):
        left = 580 * slower - (time.monotonic() - begin)
        run_part(day, part, min(LIMITS[part] * (1 if part == "hang" else slower), left))
    lines = [json.loads(line) for line in (day.out / "day.jsonl").read_text().splitlines()]
    steps = [file for part in ("times", "stock") if (file := day.out / f"{part}.json").exists()]
    if rows := [row for file in steps for row in json.loads(file.read_text())["rows"]]:
        about = provenance(f"python benchmarks/gpu.py {' '.join(o.parts)} --out DIR")
        write_json(day.out / "step.json", {**about, "rows": rows})
    wrong = [line for line in lines if not line.get("ok", True) or line.get("ended", 0)]
    print(*wrong, f"{len(lines)} lines, {len(wrong)} of them wrong: {day.out / 'day.jsonl'}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
