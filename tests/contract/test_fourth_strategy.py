"""A new strategy costs one object and one name: everything else finds it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import timm_naflex_fast

STRATEGY = '''
def by_loop(table, sizes, spec, dtype):
    """Products of dense matrices, grid by grid."""
    from .sums import definition
    from .table import whole

    cells = whole(table).double()
    return definition(cells.view(cells.shape[-3:]), sizes, spec)


STRATEGIES["loop"] = by_loop
'''

SCRIPT = """
import sys

import torch
from tests.support.oracles import BATCH, OLD_TORCH, far, relative, small_vit, trained
from tests.support.running import running

from timm_naflex_fast.commands.cli.main import main
from timm_naflex_fast.functional import resample_pos_embeds


def embed(table, strategy):
    return resample_pos_embeds(table, [(3, 4), (9, 2)], mode="bicubic", strategy=strategy)


table = torch.randn(6, 5, 4)
want = embed(table, "matmul")
assert relative(embed(table, "loop"), want) <= 2e-6
graph = torch.compile(embed, backend="eager", fullgraph=True)
allowed = 2e-6 if OLD_TORCH else 0  # whose graphs hold no operator
assert relative(graph(table, "loop"), embed(table, "loop")) <= allowed

model = small_vit()
want = trained(model, BATCH)
with running("loop", model=model):
    assert far(trained(model, BATCH), want) <= 1e-5

file = sys.argv[1]
bench = "bench --model naflexvit_base_patch16_gap --model-kwargs depth=1 embed_dim=32 num_heads=2 --phase infer"
bench += " --max-seq-len 16 --batch-size 1 --modes loop --json"
assert main([*bench.split(), file]) == 0 and '"loop"' in open(file).read()
"""


@pytest.mark.slow
def test_a_new_strategy_costs_one_object_and_one_name(tmp_path):
    package = tmp_path / "copy" / "timm_naflex_fast"
    shutil.copytree(Path(timm_naflex_fast.__file__).parent, package)
    for path in (package, *package.rglob("*")):  # a checkout may be read-only
        path.chmod(0o755)
    with (package / "pos_embed" / "strategies.py").open("a") as strategies:
        strategies.write(STRATEGY)
    names = (package / "names.py").read_text()
    (package / "names.py").write_text(names.replace('"grid_sample"]', '"grid_sample", "loop"]'))

    path = [str(package.parent), str(Path(__file__).parents[2])]
    script = f"import sys; sys.path[:0] = {path}\n{SCRIPT}"
    command = [sys.executable, "-c", script, tmp_path / "found.json"]
    run = subprocess.run(command, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout + run.stderr
