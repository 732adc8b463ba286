"""Races of a whole model: a training step and an inference, with the share of the time that the embeddings take.

| phase | what is timed |
| --- | --- |
| train | forward, cross entropy over the classes, backward, AdamW's step, zeroing the gradients |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |

The batch has random patches, padded and numbered as timm's NaFlex collator does it. A dtype other than float32 runs
under autocast.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...patching.install import enable
from ...patching.settings import Mode
from ..contenders import BASELINE
from .race import WARMUPS, Race, Timed, mark, seconds
from .workloads import Workload, coordinates

DEFAULTS: dict[str, list[Any]] = dict(
    batches=[8], dtypes=["float32"], phases=["train", "infer"], contenders=[BASELINE, "matmul"]
)


def race(
    model: Any, workload: Workload, batch: int, dtype: str, phase: str, contenders: Sequence[str], on: ExitStack
) -> Race:
    """The race of these contenders on whole steps of one model, which is switched before each; ``on`` ends it."""
    device = next(model.parameters()).device.type
    grids = workload.grids(batch)
    coord, lengths = coordinates(grids).to(device), torch.tensor([h * w for h, w in grids], device=device)
    pixels = 3 * model.embeds.patch_size[0] * model.embeds.patch_size[1]
    images = {"patches": torch.randn(*coord.shape[:2], pixels, device=device), "patch_coord": coord}
    images["patch_valid"] = torch.arange(coord.shape[1], device=device) < lengths[:, None]
    targets = torch.randint(model.num_classes or model.num_features, (batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    autocast = partial(torch.autocast, device, getattr(torch, dtype), enabled=dtype != "float32")
    shares, embeds_share = defaultdict[str, list[float]](list), dict[str, float]()

    def prepare(contender: str) -> str:
        on.close()
        if contender != BASELINE:
            on.enter_context(enable(cast(Mode, contender), model=model))
        model.train(phase == "train")
        return contender

    def step(contender: str) -> None:
        with _marked(model.embeds, device) as marks:
            with torch.inference_mode(phase == "infer"), autocast():
                out = model(images)
            if phase == "train":
                nn.functional.cross_entropy(out.float(), targets).backward()
                marks.append(mark(device))
                optimizer.step()
                optimizer.zero_grad()
        shares[contender].append(_share(marks))
        embeds_share[contender] = statistics.median(shares[contender][WARMUPS[device] :] or [0])

    about = dict(grids=len(set(grids)), tokens=int(lengths.sum()), device=device, embeds_share=embeds_share)
    about["model"] = model.pretrained_cfg["architecture"]
    made = tuple(Timed(name, step, partial(prepare, name)) for name in contenders)
    return Race("model", workload.name, phase, batch, dtype, made, about)


@contextmanager
def _marked(embeds: nn.Module, device: str) -> Iterator[list[Any]]:
    """Yields the marks of a step: its start, where the embeddings' forward begins and ends and their backward begins.

    The embeddings run first, so their backward runs last: from the moment when the gradient of their output is known
    to the end of the backward. The last mark is the step's end.
    """
    marks = [mark(device)]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        marks.append(mark(device))
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            x.register_hook(lambda grad: marks.append(mark(device)))

    enter = embeds.register_forward_pre_hook(lambda *_: marks.append(mark(device)))
    with enter, embeds.register_forward_hook(leave):
        yield marks
    marks.append(mark(device))


def _share(marks: list[Any]) -> float:
    """Which share of a step the embeddings take; their marks come in pairs, beginning and end."""
    start, *pairs, end = marks
    return sum(map(seconds, pairs[::2], pairs[1::2])) / seconds(start, end)
