"""A small model of each library is trained by the lines of docs/frameworks.md.

With the patch its losses stay.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.oracles import seeded, small_vit, vit_batch
from tests.support.running import ran

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
STEPS = 24


def lines(library, patched=True):
    """The page's lines that import a library; without ``enable`` if not ``patched``."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (block,) = [block for block in blocks if library in block]
    if patched:
        return block
    return re.sub(r"^timm_naflex_fast.enable.*\n", "", block, flags=re.M)


def by_hand(library, patched, _):
    pytest.importorskip(library)
    model = small_vit()
    scope = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 2e-3)}
    exec(lines(library, patched), scope)
    trainer = scope.get("accelerator") or scope["fabric"]
    losses = []
    for step in range(STEPS):
        sizes = torch.randint(1, 12, (5, 2), generator=seeded(step)).tolist()
        logits = scope["model"](vit_batch(sizes, seed=step % 4))
        loss = F.cross_entropy(logits, torch.arange(5))
        scope["optimizer"].zero_grad()
        trainer.backward(loss)
        scope["optimizer"].step()
        losses.append(loss.item())
    return losses


def by_trainer(library, patched, folder):
    transformers = pytest.importorskip(library, minversion="5.21")
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    vision = dict(patch_size=4, num_patches=64, **tower)
    config = transformers.Siglip2Config(vision_config=vision, text_config=tower, num_labels=5)
    transformers.set_seed(0)
    model = transformers.Siglip2ForImageClassification(config)
    sizes = torch.randint(2, 10, (40, 2))  # transformers is wrong for grids (h, 1)
    columns = {
        "pixel_values": torch.randn(40, 81, 48),
        "pixel_attention_mask": (torch.arange(81) < sizes.prod(1, keepdim=True)).long(),
        "spatial_shapes": sizes,
        "labels": torch.arange(40) % 5,
    }
    dataset = [{name: column[n] for name, column in columns.items()} for n in range(40)]
    options = dict(max_steps=STEPS, learning_rate=2e-3, logging_steps=1, save_strategy="no")
    quietly = dict(use_cpu=True, report_to=[], disable_tqdm=True)
    arguments = transformers.TrainingArguments(folder, **options, **quietly)
    scope = {"arguments": arguments, "model": model, "dataset": dataset}
    exec(lines(library, patched), scope)
    logs = scope["trainer"].state.log_history[:-1]
    return [float(log["loss"]) for log in logs]


@pytest.mark.parametrize(
    ("train", "library"),
    [(by_hand, "accelerate"), (by_hand, "lightning"), (by_trainer, "transformers")],
)
def test_losses_are_those_without_the_patch(train, library, tmp_path, clean):
    want = train(library, False, tmp_path)
    with ran("matmul") as calls:
        losses = train(library, True, tmp_path)
    assert calls == {("pos_embed", "matmul"): STEPS}
    assert losses == pytest.approx(want, rel=0, abs=1e-4)
    assert min(want) < 0.95 * want[0]  # it learns


SPAWNS = """
import timm, torch, timm_naflex_fast


def work(rank):
    timm_naflex_fast.enable()
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1)
    model(torch.randn(1, 3, 224, 320))
    print(rank, timm_naflex_fast.status().calls)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


@pytest.mark.slow
def test_spawned_workers(tmp_path, children):
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('pos_embed', 'matmul'): 1") == 2
