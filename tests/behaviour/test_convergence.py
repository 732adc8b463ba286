"""A small model of each library is trained by the lines of docs/frameworks.md: with the patch its
losses stay."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.oracles import small_vit, vit_batch
from tests.support.running import ran

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
STEPS = 24


def lines(library, patched=True):
    """The page's lines that import a library; without their call of ``enable`` if not
    ``patched``."""
    (block,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if library in block
    )
    return block if patched else re.sub(r"^timm_naflex_fast.enable.*\n", "", block, flags=re.M)


def by_hand(library, patched, _):
    pytest.importorskip(library)
    model, losses = small_vit(), []
    scope = dict(model=model, optimizer=torch.optim.AdamW(model.parameters(), 2e-3))
    exec(lines(library, patched), scope)
    trainer = scope.get("accelerator") or scope["fabric"]
    for step in range(STEPS):
        sizes = torch.randint(1, 12, (5, 2), generator=torch.Generator().manual_seed(step)).tolist()
        loss = F.cross_entropy(scope["model"](vit_batch(sizes, seed=step % 4)), torch.arange(5))
        scope["optimizer"].zero_grad()
        trainer.backward(loss)
        scope["optimizer"].step()
        losses.append(loss.item())
    return losses


def by_trainer(library, patched, folder):
    transformers = pytest.importorskip(library, minversion="5.21")
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    vision = dict(patch_size=4, num_patches=64, **tower)
    config = transformers.Siglip2Config(
        vision_config=vision, text_config=dict(vocab_size=9, **tower), num_labels=5
    )
    transformers.set_seed(0)
    model, dataset = transformers.Siglip2ForImageClassification(config), []
    for h, w in torch.randint(2, 10, (40, 2)).tolist():  # transformers is wrong for grids (h, 1)
        image = dict(
            pixel_values=torch.randn(81, 48), pixel_attention_mask=(torch.arange(81) < h * w).long()
        )
        dataset.append(image | dict(spatial_shapes=torch.tensor((h, w)), labels=len(dataset) % 5))
    how = dict(
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=2e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    arguments = transformers.TrainingArguments(folder, save_strategy="no", **how)
    exec(lines(library, patched), scope := dict(arguments=arguments, model=model, dataset=dataset))
    return [float(log["loss"]) for log in scope["trainer"].state.log_history[:-1]]


@pytest.mark.parametrize(
    ("train", "library"),
    [(by_hand, "accelerate"), (by_hand, "lightning"), (by_trainer, "transformers")],
)
def test_losses_are_those_without_the_patch(train, library, tmp_path, clean):
    want = train(library, False, tmp_path)
    with ran("matmul") as calls:
        losses = train(library, True, tmp_path)
    assert calls == {("pos_embed", "matmul"): STEPS} and len(losses) == STEPS
    assert max(abs(a - b) for a, b in zip(losses, want)) <= 1e-4 and min(want) < 0.95 * want[0]


@pytest.mark.slow
def test_spawned_workers(tmp_path, children):
    (script := tmp_path / "script.py").write_text(
        lines("multiprocessing").replace('_gap"', '_gap", depth=1')
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('pos_embed', 'matmul'): 1") == 2
