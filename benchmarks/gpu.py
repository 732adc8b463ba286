"""Everything that only a GPU can answer, in one command, from the checkout: no installation, no network.

python benchmarks/gpu.py --out DIR            # all parts
python benchmarks/gpu.py --out DIR --quick    # 9 minutes at most
python benchmarks/gpu.py --out DIR --quick --device cpu    # rehearsal, Triton's kernels in its interpreter

| part | what it asks |
| --- | --- |
| machine | versions, bytes a second of a copy and of ``x.add_(ready)``, bfloat16 products |
| tests | are the kernels right on the GPU: against timm, float64, TF32 flags, CUDA graphs, no host wait |
| step | time of a step by contender, workload, phase, batch size and dtype (``naflex-fast bench``); without Triton |
| seed | the experiment of timm issue 2514 (its figures: 240 and 1,940 ms at 256 images, 370 and 7,230 at 512) |
| model | images a second of a whole training step, before and after; eager and compiled |
| rope | rotary tables |
| kernels | time of each kernel; its bytes and occupancy where ``ncu`` is |

Each part runs in a process with a time limit, so that one failure costs nothing else, and writes DIR/PART.json.
DIR/summary.md tells the targets that were met and missed. Copy DIR to results/gpu and run tools/update_readme.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
# Seconds that each part may take: with --quick (9 minutes together), and without.
LIMITS = dict(machine=(30, 60), tests=(120, 900), step=(150, 1500), seed=(80, 300))
LIMITS |= dict(model=(80, 900), rope=(30, 120), kernels=(50, 300))
ISSUE_MS = {256: (240, 1940), 512: (370, 7230)}  # timm issue 2514: forward, forward and backward
CONTENDERS = "stock timm-flag-bilinear timm-flag-bicubic hf-siglip2 interpolate_cached grid_sample matmul plain-add"


def clock(work: Callable[[], Any], device: str, rounds: int) -> float:
    """Median milliseconds of ``work``, after one run that may compile; on a GPU its own time, with cold caches."""
    import torch

    work()
    times = []
    ahead = torch.empty(2**29, dtype=torch.uint8, device=device) if device == "cuda" else None
    for _ in range(rounds):
        if ahead is None:
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(4):  # the GPU is busy while the host puts the work into its queue
            ahead.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def draw(name: str, batch: int, device: str) -> tuple[Any, Any]:
    """A workload of the bench, and the coordinates of a batch."""
    from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates

    return WORKLOADS[name], coordinates(WORKLOADS[name].grids(batch)).to(device)


@contextmanager
def use(mode: str) -> Iterator[None]:
    """Inside, timm's classes take ``mode``."""
    import timm_naflex_fast

    with timm_naflex_fast.enable(mode):
        yield


def machine(o: argparse.Namespace) -> dict[str, Any]:
    """Versions and the two ceilings, measured."""
    import torch

    n = 2**28 if o.device == "cuda" else 2**20
    x, ready = torch.zeros(n, device=o.device), torch.randn(n, device=o.device)
    side = 8192 if o.device == "cuda" else 256
    a, b = (torch.randn(side, side, device=o.device, dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, Any] = {"copy_tb_s": 8e-9 * n / clock(lambda: x.copy_(ready), o.device, 10)}
    found["add_tb_s"] = 12e-9 * n / clock(lambda: x.add_(ready), o.device, 10)
    found["bfloat16_tflop_s"] = 2e-9 * side**3 / clock(lambda: a @ b, o.device, 10)
    if o.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "memory_gib": gpu.total_memory / 2**30, "sms": gpu.multi_processor_count}
    return found | {name: __import__(name).__version__ for name in ("triton", "numpy")}


def tests(o: argparse.Namespace) -> dict[str, Any]:
    """The tests that need a GPU; in the rehearsal a few of them, by the interpreter."""
    names = ["tests/backends/test_triton.py", "tests/backends/test_cuda.py"]
    select = ["-m", "not slow"] if o.quick else ["-m", "slow or not slow"]
    if o.device == "cpu":
        select += ["-k", "bit_for_bit or out_of_place or serves_in"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *select, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if " passed" in line or line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0, "last_line": (lines or [done.stderr[-500:]])[-1], "failed": lines[:-1]}


def step(o: argparse.Namespace) -> dict[str, Any]:
    """``naflex-fast bench``; and matmul's other form, which reads the grids on the host."""
    import torch

    from timm_naflex_fast.backends import triton

    file = o.out / "bench.part"
    options = "--batch 2 --channels 4 --rounds 1 --budget 0.01 --dtype float32".split()
    names = ["siglip", "diverse"] if o.quick else ["siglip", "diverse", "radio"]
    if o.device == "cuda":
        batches = "512" if o.quick else "1 64 512"
        options = f"--batch {batches} --dtype float32 bfloat16 --budget {0.3 if o.quick else 2}".split()
    command = [sys.executable, "-m", "timm_naflex_fast", "bench", "--device", o.device, "--workload", *names]
    command += ["--contenders", *CONTENDERS.split(), *options, "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(file.read_text())
    file.unlink()
    triton.serves = lambda *_: False
    found["without_triton_ms"] = {}
    for name in names:
        batch, channels = (512, 768) if o.device == "cuda" else (2, 4)
        workload, coord = draw(name, batch, o.device)
        embeds = workload.embeds(channels).to(o.device)
        x = torch.zeros(*coord.shape[:2], channels, device=o.device)
        with use("matmul"), torch.no_grad():
            add = lambda: embeds._apply_learned_naflex_pos_embed(x, coord)  # noqa: B023, E731
            found["without_triton_ms"][name] = clock(add, o.device, 3 if o.quick else 10)
    return found


def seed(o: argparse.Namespace) -> dict[str, Any]:
    """``patch_emb(x, coords).sum().backward()`` on random grids up to 31 x 31, and a patch kernel 32 -> 16."""
    import torch
    from timm.layers.patch_embed import PatchEmbedInterpolator
    from timm.models.naflexvit import NaFlexEmbeds

    found: dict[str, Any] = {}
    cuda, rounds = o.device == "cuda", 1 if o.quick else 5
    channels = 768 if cuda else 8
    for batch in ISSUE_MS if cuda else (2,):
        _, coord = draw("diverse", batch, o.device)
        x = torch.randn(*coord.shape[:2], 768, device=o.device)
        for mode in ("stock", "matmul"):
            embeds = NaFlexEmbeds(embed_dim=channels, proj_type="linear", pos_embed_grid_size=(32, 32)).to(o.device)
            with use(mode):
                with torch.no_grad():
                    forward = clock(lambda: embeds(x, coord), o.device, rounds)  # noqa: B023
                train = clock(lambda: _total(embeds(x, coord)).backward(), o.device, rounds)  # noqa: B023
            found[f"{mode}, {batch} images, ms"] = [forward, train]
    weight = torch.randn(channels, 32 * 32 * 3, device=o.device, requires_grad=True)
    for mode in ("stock", "matmul"):
        with use(mode):
            patch = PatchEmbedInterpolator((32, 32), in_chans=3, embed_dim=channels)
            train = clock(lambda: patch.resample_linear_weight(weight, (16, 16)).sum().backward(), o.device, 5)  # noqa: B023
        found[f"{mode}, patch kernel, ms"] = train
    return found


def _total(out: Any) -> Any:
    return (out[0] if isinstance(out, tuple) else out).sum()


def model(o: argparse.Namespace) -> dict[str, Any]:
    """Images a second: forward, backward, bfloat16 autocast."""
    import timm
    import torch
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    cuda, found = o.device == "cuda", {}
    for batch in (2,) if not cuda else (64,) if o.quick else (64, 256):
        _, coord = draw("siglip", batch, o.device)
        data = {"patches": torch.randn(*coord.shape[:2], 768, device=o.device), "patch_coord": coord}
        data["patch_valid"] = torch.ones(coord.shape[:2], dtype=torch.bool, device=o.device)
        for form in ("eager", "compiled") if cuda else ("eager",):
            for mode in ("stock", "matmul"):
                if form == "compiled" and o.quick:
                    continue
                small = NaFlexVitCfg(embed_dim=32, depth=1, num_heads=2)
                net = timm.create_model("naflexvit_base_patch16_siglip") if cuda else NaFlexVit(small)
                net = net.to(o.device).train()
                with use(mode):
                    run = torch.compile(net) if form == "compiled" else net

                    def train() -> None:
                        with torch.autocast(o.device, torch.bfloat16):
                            loss = run(data).float().sum()  # noqa: B023
                        loss.backward()
                        net.zero_grad()  # noqa: B023

                    found[f"{form}, {mode}, {batch}: images/s"] = 1e3 * batch / clock(train, o.device, 5)
    return found


def rope(o: argparse.Namespace) -> dict[str, Any]:
    """Rotary tables of a batch, timm's and ours."""
    import torch
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    batch, found = 64 if o.device == "cuda" else 2, {}
    _, coord = draw("siglip", batch, o.device)
    for kind in ("axial", "mixed"):
        cfg = NaFlexVitCfg(embed_dim=128, depth=2, num_heads=2, rope_type=kind, pos_embed="none")
        net = NaFlexVit(cfg).to(o.device).eval()
        x = torch.zeros(*coord.shape[:2], 128, device=o.device)
        for mode in ("stock", "matmul"):
            with use(mode), torch.no_grad():
                found[f"{kind}, {mode}, ms"] = clock(lambda: net._generate_rope_naflex(x, coord), o.device, 5)  # noqa: B023
    return found


def kernels(o: argparse.Namespace) -> dict[str, Any]:
    """The time of each kernel of a training step at 512 images; in the rehearsal that all of them run."""
    import torch

    from timm_naflex_fast.backends import triton
    from timm_naflex_fast.resampling.matrices import ResizeSpec

    cuda, found = o.device == "cuda", {}
    batch, channels = (512, 768) if cuda else (1, 16)
    triton.LONGEST = triton.LONGEST if cuda else 64
    for name in ("siglip",) if o.quick and not cuda else ("siglip", "diverse"):
        like, coord = draw(name, batch, o.device)
        how = ResizeSpec(like.mode, **like.more)
        for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
            table = torch.randn(*like.table, channels, device=o.device, requires_grad=True)
            x, g = (torch.randn(*coord.shape[:2], channels, device=o.device, dtype=dtype) for _ in range(2))

            def train() -> None:
                out = x.clone()  # noqa: B023
                triton.add_learned(out, table, coord, how)  # noqa: B023
                torch.autograd.grad(out, table, g)  # noqa: B023

            train()
            if not cuda:
                found[name] = "every kernel ran; the interpreter has no times"
                continue
            kind = torch.profiler.ProfilerActivity.CUDA
            with torch.profiler.profile(activities=[kind]) as profile:
                for _ in range(5):
                    train()
                torch.cuda.synchronize()
            rows = profile.key_averages()
            times = {row.key: [row.self_device_time_total / 5e3, row.count / 5] for row in rows}
            found[f"{name} {dtype}: ms, launches a step"] = times
    if cuda and shutil.which("ncu") and not o.quick and not os.environ.get("NCU_INSIDE"):
        metrics = "gpu__time_duration.sum,dram__bytes.sum,sm__warps_active.avg.pct_of_peak_sustained_active"
        command = ["ncu", "--csv", "--kernel-name", "regex:_kernel$", "--launch-count", "24", "--metrics", metrics]
        command += [sys.executable, __file__, "--out", str(o.out / "ncu"), "--quick", "--part", "kernels"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NCU_INSIDE": "1"})
        shutil.rmtree(o.out / "ncu", ignore_errors=True)
        found["ncu"] = done.stdout.splitlines()[-100:]
    return found


def summary(out: Path) -> list[str]:
    """Targets met and missed, and the three slowest kernels."""
    found = {part: json.loads((out / f"{part}.json").read_text()) for part in LIMITS if (out / f"{part}.json").exists()}
    lines = [f"{part}: {data['error']}" for part, data in found.items() if "error" in data]
    if "passed" in found.get("tests", {}):
        lines.append(f"tests {'passed' if found['tests']['passed'] else 'FAILED'}: {found['tests']['last_line']}")
    for row in found.get("step", {}).get("rows", []):
        if row["contender"] != "matmul" or row["phase"] == "frozen" or row["batch"] != 512:
            continue
        times, most = row["times_plain_add"], 1.3 if row["phase"] == "infer" else 1.5
        work = f"{row['workload']} {row['dtype']} {row['phase']} B={row['batch']}"
        lines.append(f"{'met' if times <= most else 'MISSED'}: {work}: {times:.2f} times one plain add (target {most})")
        if (row["workload"], row["phase"]) == ("diverse", "train") and row["times_faster"] is not None:
            met = "met" if row["times_faster"] >= 300 else "MISSED"
            lines.append(f"{met}: {work}: {row['times_faster']:.0f} times faster than timm (target 300)")
    works = [(work, times) for work, times in found.get("kernels", {}).items() if isinstance(times, dict)]
    every = [(ms, name, work) for work, times in works for name, (ms, _) in times.items() if name.endswith("_kernel")]
    lines += [f"slowest kernels: {ms:.3f} ms {name}, {work.split(':')[0]}" for ms, name, work in sorted(every)[:-4:-1]]
    return lines


def main() -> int:
    """Run every part in a process, or the one that ``--part`` names in this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="9 minutes at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    o = parser.parse_args()
    o.out = o.out.resolve()
    o.out.mkdir(parents=True, exist_ok=True)
    if o.part:
        from timm_naflex_fast.measure.output import provenance

        found = globals()[o.part](o)
        record = {**provenance("python benchmarks/gpu.py --out DIR" + " --quick" * o.quick), "rows": [], **found}
        (o.out / f"{o.part}.json").write_text(json.dumps(record, indent=1) + "\n")
        return 0
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({"TRITON_INTERPRET": "1"} if o.device == "cpu" else {})}
    for part, limits in LIMITS.items():
        start, limit = time.monotonic(), limits[not o.quick] * (3 if o.device == "cpu" else 1)
        command = [sys.executable, __file__, "--out", str(o.out), "--device", o.device, "--part", part]
        try:
            done = subprocess.run(
                command + ["--quick"] * o.quick, env=env, timeout=limit, capture_output=True, text=True
            )
            error = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            error = [f"stopped after {limit} s"]
        if error:
            (o.out / f"{part}.json").write_text(json.dumps({"rows": [], "error": error[0]}) + "\n")
        print(f"{part}: {time.monotonic() - start:.0f} s {''.join(error)}", flush=True)
    lines = summary(o.out)
    (o.out / "summary.md").write_text("\n".join(f"- {line}" for line in lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
