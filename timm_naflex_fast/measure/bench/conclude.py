"""What the rows of a bench mean, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ...names import STRATEGY_NAMES
from ..contenders import BASELINE
from .race import Row

STEPS = {"train": "a training step", "infer": "an inference", "frozen": "an inference with a frozen table"}


def conclude(rows: Sequence[Row]) -> Iterator[str]:
    """For each batch and strategy, what it saves where; and how to find out what that means for a whole model."""
    batches = defaultdict[Any, dict[tuple[str, str], Row]](dict)
    for row in rows:
        work = row.suite, row.about.get("model"), row.workload, row.batch, row.dtype
        batches[work][row.contender, row.phase] = row
    for (_, model, workload, batch, dtype), found in batches.items():
        for name in STRATEGY_NAMES:
            pairs = [(found.get((BASELINE, phase)), row) for (other, phase), row in found.items() if other == name]
            parts = [_saving(stock, row) for stock, row in pairs if stock is not None]
            if parts:
                what = f"{model or 'the position embedding'} with {batch} images ({workload}, {dtype})"
                yield f"On this machine, for {what}, `{name}` {'; '.join(parts)}."
    if rows and not any(row.about.get("model") for row in rows):
        yield "In a model the position embedding is a small part of a step: bench --model NAME times a whole one."


def _saving(stock: Row, own: Row) -> str:
    """What one strategy saves of a step, or that it cannot be told from the noise.

    A model's step may differ by more than its embeddings do: that too is noise, since nothing else has changed.
    """
    saved = 1 - own.median_ms / stock.median_ms
    spread = max(stock.spread or 0, own.spread or 0)
    noise, more, step = spread, "", STEPS[own.phase]
    if shares := own.about.get("embeds_share"):
        before, after = shares[stock.contender], shares[own.contender]
        noise = max(noise, abs(saved - (before - after * (1 - saved))))
        more = f", embeddings {100 * before:.1f} -> {100 * after:.1f} % of the step"
        if saved > before + spread:
            why = f"{100 * saved:.1f} % is more than timm's embeddings take: run again, or with a larger --budget{more}"
            return f"was disturbed in {step} (a saving of {why})"
    if min(stock.rounds, own.rounds) < 3:
        return f"makes no measurable difference to {step} (too few rounds to tell the noise{more})"
    change = f"saves {100 * saved:.1f} % of" if saved > 0 else f"adds {-100 * saved:.1f} % to"
    change = change if abs(saved) > noise else "makes no measurable difference to"
    return f"{change} {step} (rounds of the same code differ by {100 * spread:.1f} %{more})"
