"""``naflex-fast run``: Python itself runs the script, and timm is patched in all of the script's
processes."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import digits
import pytest

from tests.support.oracles import embed, small_vit
from timm_naflex_fast import status
from timm_naflex_fast.commands.cli import run as launcher
from timm_naflex_fast.patching.calls import Settings

RUN = ["-m", "timm_naflex_fast", "run"]
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
NOT_IMPORTED = "naflex-fast (one): this process did not import timm.models.naflexvit, so nothing was patched in it\n"
SCRIPT = """
import sys
print(sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name, __package__)
print(sys.modules["__main__"].__dict__ is globals())
sys.exit(7)
"""
CHILDREN = """
import json, os, subprocess, sys
from multiprocessing import get_context

def look(_=None):
    flags = json.loads(os.environ["TIMM_NAFLEX_FAST_RUN"])
    return type(sys.meta_path[0]).__name__, *flags["flags"].values(), flags["first"], "torch" in sys.modules

if __name__ == "__main__":
    print(look())
    for method in ("spawn", "forkserver", "fork"):
        with get_context(method).Pool(1) as pool:
            print(pool.apply(look))
    from joblib import Parallel, delayed
    print(Parallel(n_jobs=2)(delayed(look)() for _ in range(2))[0])
    code = "import children; print(children.look())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for python in (sys.executable, sys.argv[1]):
        said = subprocess.run([python, "-c", "import sitecustomize as s; print(s.mine)"], capture_output=True)
        print(said.stdout + said.stderr)
"""
SIGLIP2 = """
import torch, transformers
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
config = transformers.Siglip2VisionConfig(hidden_size=32, patch_size=4, num_patches=16)
Siglip2VisionEmbeddings(config)(torch.randn(1, 8, 48), torch.tensor([[2, 4]]))
"""


def before(path, name):
    """An environment variable of folders that begins with one more."""
    return {name: os.pathsep.join([str(path), os.environ.get(name, str(path))])}


def run(*arguments, launch=RUN, env=(), given="", cwd=None):
    """Exit status, stdout and stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}
    options = dict(capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)
    done = subprocess.run([sys.executable, *launch, *arguments], input=given, **options)
    err = re.sub(r"process \d+, rank 0", "one", done.stderr)
    return done.returncode, done.stdout, err


@pytest.mark.parametrize(("script", "status"), [("tool.py", 7), ("fails.py", 1)])
def test_a_script_runs_as_python_runs_it(script, status, tmp_path):
    (tmp_path / "tool.py").write_text(SCRIPT)
    (tmp_path / "fails.py").write_text(SCRIPT.replace("sys.exit(7)", "fails()"))
    command = [script, "--", "-h", "--mode", "mine", "--"]
    code, out, err = run(*command, launch=[], cwd=tmp_path)
    assert (code, out.count("\n")) == (status, 2)
    ours = run("--mode", "stock", *command, cwd=tmp_path)
    assert ours == (code, out, err + NOT_IMPORTED)


def test_every_kind_of_process_is_prepared_and_one_speaks(tmp_path):
    """The user's own ``sitecustomize`` runs, in an interpreter that cannot import this package
    too."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("mine = 'chained'")
    venv.create(tmp_path / "bare")
    env = before(tmp_path / "site", "PYTHONPATH")
    bare = str(tmp_path / "bare" / "bin" / "python")
    code, out, err = run(
        "--strict", "--mode", "grid-sample", "children.py", bare, cwd=tmp_path, env=env
    )
    lines = ["('ImportHookFinder', 'grid_sample', True, False, False)"] * 6 + [r"b'chained\n'"] * 2
    assert (code, out.splitlines(), err) == (0, lines, NOT_IMPORTED)
    (tmp_path / "site" / "sitecustomize.py").write_text("import missing_module")
    assert "missing_module" in run("-", cwd=tmp_path, env=env)[2]


def test_a_script_that_cannot_be_patched_does_not_run(tmp_path):
    (tmp_path / "wrapt.py").write_text("raise ImportError('none')")
    code, out, err = run("-", given="print(1)", env=before(tmp_path, "PYTHONPATH"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not prepared: none" in err


def test_a_command_runs_and_the_python_that_it_starts_is_prepared(tmp_path):
    command = tmp_path / "train"
    look = "import sys; print(type(sys.meta_path[0]).__name__)"
    command.write_text(f'#!/bin/sh\n"{sys.executable}" -c "{look}"')
    command.chmod(0o755)
    assert run("train", env=before(tmp_path, "PATH")) == (0, "ImportHookFinder\n", "")


@pytest.mark.slow
def test_transformers_is_patched():
    pytest.importorskip("transformers", minversion="5.21")
    code, _, err = run("--library", "transformers", "-", given=SIGLIP2)
    assert code == 0 and re.search(
        "rope by batched; in this process ran pos_embed by matmul 1 times", err
    ), err


def test_modes_and_flags_and_who_speaks(clean, monkeypatch, capfd):
    at_exit = []
    monkeypatch.setattr(launcher.atexit, "register", lambda *call: at_exit.append(call))

    def end(order, work=bool):
        """Do what ``sitecustomize`` does, here, where timm is imported already; what is said at the
        end."""
        monkeypatch.setenv(launcher.ENV_NAME, order)
        launcher.prepare_process()
        report, wanted = at_exit.pop()
        work()
        report(wanted)
        return capfd.readouterr().err

    flags = dict(mode="interpolate_cached", strict=True)
    order = json.dumps(dict(flags=flags, libraries=["timm"], first=True, speaks=True))
    monkeypatch.setenv("RANK", "1")
    line = (
        r"naflex-fast \(process \d+, rank 1\): pos_embed by interpolate_cached, patch_embed by matmul, "
        r"rope by batched, strict; in this process ran none of them\n"
    )
    assert re.fullmatch(line, end(order))
    assert status().flags == Settings("interpolate_cached", "matmul", "batched")
    assert status().flags.strict
    below = os.environ[launcher.ENV_NAME]
    assert end(below) == ""  # nor does a process below in which nothing ran
    monkeypatch.delenv("RANK")
    line = r"naflex-fast \(process \d+, rank 0\): .*pos_embed by interpolate_cached 1 times\n"
    assert re.fullmatch(line, end(below, work=lambda: embed(small_vit())))


@pytest.mark.slow
def test_torchrun_trains_with_every_rank_patched(children, tmp_path):
    script = Path(digits.__file__).with_name("train_digits.py")
    out = tmp_path / "digits.safetensors"
    options = f"{script} --mode stock --steps 3 --out {out}"
    code, _, err = run(*TORCHRUN.split(), *options.split())
    assert code == 0, err
    assert json.loads(out.with_suffix(".json").read_text())["processes"] == 2
    said = r"^naflex-fast \((?:one|process \d+, rank (1))\): pos_embed by matmul, .* ran .*pos_embed by matmul \d+ times"
    assert sorted(re.findall(said, err, re.M)) == ["", "1"], err
    for ran in children():
        assert ran["pos_embed", "matmul"] > 0 == ran["pos_embed", "stock"]
