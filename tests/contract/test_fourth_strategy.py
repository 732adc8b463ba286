"""A new strategy costs one module and one name: everything else finds it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import timm_naflex_fast

MODULE = '''
"""``loop``: products of dense matrices, grid by grid."""

import torch

from ..resampling import dense_resize
from .matmul import SparseSums


class Dense(SparseSums):
    """The slow way."""

    for_grid_sample = None

    def resample(self, tables, batch):
        for group, embedding in dense_resize.resample([t.detach().double() for t in tables], batch.groups, batch.spec):
            yield group, embedding.to(batch.dtype)


STRATEGY = Dense()
'''

SCRIPT = """
import sys

import torch
from tests.support.oracles import BATCH, Case, relative, row_major, small_vit, stock

from timm_naflex_fast import enable, status
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.functional import resample_pos_embeds

table = torch.randn(6, 5, 4, requires_grad=True)
got, want = (resample_pos_embeds(table, [(3, 4), (9, 2)], mode="bicubic", strategy=s) for s in ("loop", "matmul"))
assert relative(got, want) <= 2e-6
grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (got, want)]
assert relative(*grads) <= 1e-5

model = small_vit()
out = model(BATCH)
want = torch.autograd.grad(out.square().sum(), model.embeds.pos_embed)[0]
with enable("loop", model=model):
    got = model(BATCH)
    grad = torch.autograd.grad(got.square().sum(), model.embeds.pos_embed)[0]
    assert status().calls == {("pos_embed", "loop"): 1}, status().calls
assert relative(got, out) <= 1e-5 and relative(grad, want) <= 1e-5

folder = sys.argv[1]
drift = ["--model", "naflexvit_base_patch16_gap", "--model-kwargs", "depth=1", "embed_dim=24", "num_heads=2"]
small = ["drift", *drift, "--random-weights", "--images", folder, "--max-seq-len", "16", "--json", folder + "/d.json"]
assert main(small) == 0
assert '"loop"' in open(folder + "/d.json").read()
times = ["bench", "--workload", "siglip", "--batch", "1", "--phase", "infer", "--contenders", "loop", "--rounds", "1"]
assert main([*times, "--json", folder + "/b.json"]) == 0
assert '"loop"' in open(folder + "/b.json").read()
"""


def test_one_module_and_one_name(tmp_path, photos):
    package = tmp_path / "copy" / "timm_naflex_fast"
    shutil.copytree(Path(timm_naflex_fast.__file__).parent, package)
    (package / "strategies" / "loop.py").write_text(MODULE)
    names = package / "names.py"
    text = names.read_text()
    names.write_text(re.sub(r'"matmul"\]', '"matmul", "loop"]', text, count=1))
    assert names.read_text() != text
    root = Path(__file__).parents[2]
    path = f"import sys; sys.path[:0] = [{str(package.parent)!r}, {str(root)!r}]\n"
    run = subprocess.run([sys.executable, "-c", path + SCRIPT, str(photos)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
