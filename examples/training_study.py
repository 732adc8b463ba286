"""What the choice of interpolation does to training: the digits, every strategy, the same seeds.

uv run examples/training_study.py            # a quarter of an hour of a CPU core; writes results/training_study/
uv run examples/training_study.py --render   # print and draw again what is there
uv run examples/training_study.py --quick    # seconds; the same code on too few steps to conclude anything

Trains the model of digits.py under timm's own code and under each strategy, and under timm's own code once more with
a single weight one float32 rounding away: what that run does differently is what any rounding does. Then evaluates
every trained model under every strategy, and fine-tunes the ones trained by timm's own code with grid_sample.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from digits import CONFIG, HELD_OUT_GRIDS, TRAIN_SEQ_LENS, Batch, accuracy, build_model, held_out_batches, split
from timm.models.naflexvit import NaFlexVit
from torch import Tensor
from train_digits import MODES, RECIPE, train
from training_report import NUDGED, STEPS_TO_COINCIDE, TOLERANCE, draw, read, report

import timm_naflex_fast
from timm_naflex_fast.measure.output import progress
from timm_naflex_fast.measure.provenance import provenance

OUT = Path(__file__).resolve().parent.parent / "results" / "training_study"
EXACT = ("interpolate_cached", "matmul")
WINDOW = 20  # steps whose losses are averaged in losses.csv
# The long warm-up keeps rounding from growing to 1e-4 of the loss within 200 steps. With the 3 epochs of
# train_digits.py it does, for timm's own code started one rounding away as well.
FULL: dict[str, Any] = dict(seeds=(0, 1, 2), steps=1424, warmup=623, lr=1e-3, batch_size=16, held_out=None)
FULL |= dict(tune_lr=3e-4, tune_warmup=20, tune_at=(0, 10, 20, 40, 80, 160, 267, 356))
QUICK = FULL | dict(seeds=(0,), steps=12, tune_warmup=2, tune_at=(0, 1, 2), held_out=1)

Weights = dict[str, Tensor]


def start(seed: int, nudged: bool = False) -> NaFlexVit:
    """The untrained model of this seed; ``nudged`` moves one of its weights to the next float32."""
    torch.manual_seed(seed)
    model = build_model()
    if nudged:
        with torch.no_grad():
            first = model.embeds.proj.weight.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.tensor(torch.inf)))
    return model


def evaluate(model: NaFlexVit, strategy: str, batches: Iterable[Batch]) -> float:
    with timm_naflex_fast.enable(mode=strategy, model=model):
        return accuracy(model, batches)


def train_all(
    seed: int, images: Tensor, labels: Tensor, plan: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, Weights]]:
    """Losses of every step, and the trained weights, by what trained them; the same batches for all of them."""
    losses, weights = {}, {}
    for name in (*MODES, NUDGED):
        model = start(seed, nudged=name == NUDGED)
        with timm_naflex_fast.enable(mode="stock" if name == NUDGED else name, model=model):
            steps = train(
                model,
                images,
                labels,
                plan["steps"],
                plan["warmup"],
                lr=plan["lr"],
                batch_size=plan["batch_size"],
                seed=seed,
            )
            losses[name] = list(track(steps, f"seed {seed}: {name}", plan["steps"]))
        weights[name] = {k: v.clone() for k, v in model.state_dict().items()}
    return losses, weights


def commit() -> str:
    """The commit of this checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, stdout=subprocess.PIPE, text=True).stdout.strip() or "unknown"


def track(steps: Iterable[Any], what: str, total: int) -> Iterator[Any]:
    """The steps, with a line on stderr now and then."""
    advance = progress(what, total)
    for step in steps:
        yield step
        advance()


def fine_tune(
    weights: Weights, strategy: str, seed: int, data: tuple[Tensor, Tensor], held_out: list[Batch], plan: dict[str, Any]
) -> list[float]:
    """Accuracy under ``strategy`` after each of ``plan["tune_at"]`` steps of training under it."""
    model = start(seed)
    model.load_state_dict(weights)
    scores, total = [evaluate(model, strategy, held_out)], plan["tune_at"][-1]
    with timm_naflex_fast.enable(mode=strategy, model=model):
        steps = train(
            model,
            *data,
            total,
            plan["tune_warmup"],
            lr=plan["tune_lr"],
            batch_size=plan["batch_size"],
            seed=seed + 1000,  # batches that the weights were not trained on
        )
        for step, _ in enumerate(track(steps, f"seed {seed}: fine-tuning with {strategy}", total), 1):
            if step in plan["tune_at"]:
                scores.append(accuracy(model, held_out))
    return scores


def largest_difference(losses: dict[str, list[float]], name: str, steps: int = STEPS_TO_COINCIDE) -> float:
    """Of the loss under ``name`` from the loss under timm's own code, over the first steps."""
    return max(abs(a - b) for a, b in zip(losses[name][:steps], losses["stock"][:steps]))


def first_apart(losses: dict[str, list[float]], name: str) -> int | None:
    """The first step, counted from 1, whose loss is farther than TOLERANCE from timm's own; None without one."""
    pairs = enumerate(zip(losses[name], losses["stock"]), 1)
    return next((step for step, (a, b) in pairs if abs(a - b) > TOLERANCE), None)


def study(plan: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, list[float]]]]:
    """Run it all: the figures for study.json, and per seed the losses of every step.

    Raises:
        RuntimeError: a strategy that is exact left timm's loss curve within the first steps.
    """
    train_x, train_y, test_x, test_y = split()
    held_out = list(itertools.islice(held_out_batches(test_x, test_y), plan["held_out"]))
    names = (*MODES, NUDGED)
    losses: dict[int, dict[str, list[float]]] = {}
    table: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in MODES} for name in names}
    tuned: dict[str, list[list[float]]] = {"grid_sample": [], "matmul": []}
    for seed in plan["seeds"]:
        losses[seed], weights = train_all(seed, train_x, train_y, plan)
        for name in EXACT:
            worst = largest_difference(losses[seed], name)
            if worst > TOLERANCE:
                raise RuntimeError(
                    f"seed {seed}: {name}'s loss is {worst:.1e} from timm's; at most {TOLERANCE} is exact"
                )
        for name, mode in itertools.product(names, MODES):
            model = start(seed)
            model.load_state_dict(weights[name])
            table[name][mode].append(evaluate(model, mode, held_out))
        for strategy, curves in tuned.items():
            curves.append(fine_tune(weights["stock"], strategy, seed, (train_x, train_y), held_out, plan))
    others = [name for name in names if name != "stock"]
    return {
        "largest_difference": {name: [largest_difference(losses[s], name) for s in losses] for name in others},
        "first_apart": {name: [first_apart(losses[s], name) for s in losses] for name in others},
        "accuracy": table,
        "fine_tuning": {"steps": list(plan["tune_at"]), **tuned},
        "held_out_images": sum(len(targets) for _, targets in held_out),
    }, losses


def write(out: Path, record: dict[str, Any], losses: dict[int, dict[str, list[float]]]) -> None:
    """study.json; the losses of the first steps in full; and of all steps the mean of every WINDOW."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    columns = [(seed, name) for seed in losses for name in losses[seed]]
    header = ["step", *(f"{name} seed {seed}" for seed, name in columns)]
    curves = [losses[seed][name] for seed, name in columns]
    with open(out / "losses_first_steps.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        rows = itertools.islice(zip(*curves), STEPS_TO_COINCIDE)
        writer.writerows([step, *(f"{loss:.9g}" for loss in row)] for step, row in enumerate(rows, 1))
    with open(out / "losses.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for last in range(WINDOW, len(curves[0]) + 1, WINDOW):
            means = (sum(curve[last - WINDOW : last]) / WINDOW for curve in curves)
            writer.writerow([last, *(f"{mean:.6f}" for mean in means)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: shows that it runs, nothing else")
    parser.add_argument("--out", type=Path, help="folder for the results (with --quick: none unless given)")
    parser.add_argument("--render", action="store_true", help="train nothing; print and draw again from the files")
    options = parser.parse_args(argv)
    if options.render:
        print(report(read(options.out or OUT)))
        draw(options.out or OUT)
        return 0
    plan, out = (QUICK, options.out) if options.quick else (FULL, options.out or OUT)
    # One thread: a sum divided otherwise among threads rounds otherwise, and the run could not be repeated.
    torch.set_num_threads(1)
    before = time.process_time()
    try:
        figures, losses = study(plan)
    except RuntimeError as error:
        print(f"training_study.py: {error}", file=sys.stderr)
        return 1
    record = {
        "commit": commit(),
        **provenance("uv run examples/training_study.py" + " --quick" * options.quick),
        "cpu_seconds": round(time.process_time() - before),
        "model": CONFIG,
        "recipe": RECIPE | {"train_seq_lens": TRAIN_SEQ_LENS},
        "held_out_grids": [f"{h}x{w}" for h, w in HELD_OUT_GRIDS],
        "plan": plan,
        **figures,
    }
    record = json.loads(json.dumps(record))
    print(report(record))
    if out:
        write(out, record, losses)
        draw(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
