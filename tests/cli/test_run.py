"""``naflex-fast run``: Python itself runs the script, and timm is patched in all of the script's processes."""

import os
import re
import signal
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from timm_naflex_fast import disable, status
from timm_naflex_fast.cli import run as launcher
from timm_naflex_fast.cli.main import main

TRAINING = str(Path(__file__).parents[1] / "support" / "train_with_timms_loader.py")
RUN = ["-m", "timm_naflex_fast", "run"]
NOT_IMPORTED = "naflex-fast: this process did not import timm; processes that it started are patched if they did\n"


def run(*arguments, launch=RUN, env=(), given="", cwd=None):
    """Exit status, stdout and stderr."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "TIMM_NAFLEX_FAST_MODE")}
    environment |= {"OMP_NUM_THREADS": "1", **dict(env)}
    command = [sys.executable, *launch, *arguments]
    options = dict(capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)
    done = subprocess.run(command, input=given, **options)
    return done.returncode, done.stdout, done.stderr


SCRIPT = """
import pickle, sys
count: int = 0
class Here: pass
print(sys.argv, sys.path, sys.flags.optimize, sys.warnoptions)
print(__name__, __file__ if "__file__" in globals() else None, __spec__ and __spec__.name, __package__)
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Here()))) is Here)
print(isinstance(__builtins__, type(sys)), __annotations__)
sys.exit(7)
"""
FLAGS = "import sys; print(sys.stdout.write_through, sys.flags.interactive)"
CTRL_C = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this test was started with
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("options", "script", "given", "status"),
    [
        *((["-O", "-Werror::FutureWarning"], script, "", 7) for script in ("script.py", ".", "app.zip")),
        (["-O"], "-", SCRIPT, 7),
        (["-O"], "-m package.tool", "", 7),
        ([], "fails.py", "", 1),
        ([], "ctrl_c.py", "", -signal.SIGINT),
        (["-u", "-i"], "flags.py", "import sys\nsys.exit(3)\n", 3),
        ([], "no_such_script.py", "", 2),
    ],
)
def test_a_script_runs_as_python_runs_it(options, script, given, status, tmp_path):
    texts = dict.fromkeys(["script.py", "__main__.py", "package/tool.py"], SCRIPT)
    texts |= {"package/__init__.py": "", "fails.py": "def f(): raise ValueError('mine')\nf()"}
    texts |= {"flags.py": FLAGS, "ctrl_c.py": CTRL_C}
    (tmp_path / "package").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
    command = [*script.split(), "--", "-h", "--mode", "mine", "--"]
    code, out, err = run(*command, launch=options, cwd=tmp_path, given=given)
    assert code == status and out.count("\n") == {7: 4, 3: 1}.get(status, 0)
    ours = run("--rope", "stock", *command, launch=[*options, *RUN], cwd=tmp_path, given=given)
    assert ours == (code, out, err + NOT_IMPORTED)


CHILDREN = """
import json, os, subprocess, sys
from multiprocessing import get_context

def look(_=None):
    flags = json.loads(os.environ["TIMM_NAFLEX_FAST_RUN"])
    return type(sys.meta_path[0]).__name__, flags["flags"]["pos_embed"], flags["first"], "torch" in sys.modules

if __name__ == "__main__":
    print(look())
    for method in ("spawn", "forkserver", "fork"):
        with get_context(method).Pool(1) as pool:
            print(pool.apply(look))
    from joblib import Parallel, delayed
    print(Parallel(n_jobs=2)(delayed(look)() for _ in range(2))[0])
    code = "import children; print(children.look())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    print(subprocess.run([sys.executable, "-c", "import user_setup"], stderr=subprocess.PIPE).stderr == b"")
    import sitecustomize
    print(sitecustomize.mine, os.environ["FROM_SITE"])
"""


def test_every_kind_of_process_is_prepared_and_one_speaks(tmp_path):
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "user_setup.py").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nmine = 'chained'\nos.environ['FROM_SITE'] = 'yes'")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    code, out, err = run("--mode", "grid-sample", "children.py", cwd=tmp_path, env=env)
    lines = ["('ImportHookFinder', 'grid_sample', False, False)"] * 6 + ["True", "chained yes"]
    assert (code, out.splitlines(), err) == (0, lines, NOT_IMPORTED)
    (tmp_path / "site" / "sitecustomize.py").write_text("import missing_module")
    assert "missing_module" in run("user_setup.py", cwd=tmp_path, env=env)[2]
    code, _, err = run("-", launch=["-I", *RUN])  # a Python that ignores the environment is refused
    assert code == 2 and "-E, -I and -S" in err and err.count("\n") == 1


SIGLIP2 = """
import torch, transformers
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
config = transformers.Siglip2VisionConfig(hidden_size=32, patch_size=4, num_patches=16)
Siglip2VisionEmbeddings(config)(torch.randn(1, 8, 48), torch.tensor([[2, 4]]))
"""


@pytest.mark.slow
def test_transformers_is_patched(tmp_path):
    pytest.importorskip("transformers", minversion="5.21")
    (tmp_path / "script.py").write_text(SIGLIP2)
    code, _, err = run("--library", "transformers", "script.py", cwd=tmp_path)
    assert code == 0 and re.search(r"transformers \S+, 4 functions replaced; .* pos_embed by matmul 1 times", err), err


@pytest.fixture
def executed(monkeypatch):
    """What ``run`` would start: (command, environment)."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call[1:]))
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield calls
    disable()


def prepare(environment, monkeypatch):
    """Do what ``sitecustomize`` does, in this process, where timm is imported already; the functions for the end."""
    at_exit = []
    monkeypatch.setenv(launcher.VARIABLE, environment[launcher.VARIABLE])
    monkeypatch.setattr(launcher.atexit, "register", lambda *call: at_exit.append(call))
    launcher.prepare_process()
    return at_exit


def test_modes_and_flags(executed, monkeypatch, capfd):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "interpolate-cached")
    main(["run", "--rope", "stock", "script.py"])
    monkeypatch.setenv("RANK", "1")
    main(["run", "--mode", "grid-sample", "script.py"])
    (_, first), (command, second) = executed
    assert command[-1] == "script.py"
    assert prepare(second, monkeypatch) == [] and status().flags.pos_embed == "grid_sample"
    monkeypatch.setenv("RANK", "0")
    ((report, process),) = prepare(first, monkeypatch)
    assert asdict(status().flags) == dict(pos_embed="interpolate_cached", patch_embed="matmul", rope="stock")
    assert prepare({launcher.VARIABLE: os.environ[launcher.VARIABLE]}, monkeypatch) == []  # a child says nothing
    report(process + 1)  # nor does a fork
    report(process)
    line = r"naflex-fast: pos_embed=interpolate_cached, .*rope=stock; timm .* replaced.*\n"
    assert re.fullmatch(line, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("words", "mode", "startup", "message"),
    [
        ("--mode fast", "", "", "'fast' is not valid for mode; valid: 'stock'"),
        ("", "fast", "", "'fast' is not valid for TIMM_NAFLEX_FAST_MODE"),
        ("--library transformers --mode grid-sample", "", "", "'grid_sample' is not valid with transformers; valid: "),
        ("", "", f"/home/a{os.pathsep}b/startup", "PYTHONPATH cannot hold /home/a"),
    ],
)
def test_what_is_wrong_is_one_line_and_starts_nothing(words, mode, startup, message, executed, monkeypatch, capfd):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", mode)
    monkeypatch.setattr(launcher, "STARTUP", startup or launcher.STARTUP)
    assert main(["run", *words.split(), "script.py"]) == 2 and not executed and status().flags.is_stock
    err = capfd.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_variable_that_is_gone_prepares_nothing_and_a_timm_without_naflex_is_named(monkeypatch):
    monkeypatch.delenv(launcher.VARIABLE, raising=False)
    launcher.prepare_process()
    assert status().flags.is_stock
    monkeypatch.setitem(sys.modules, "timm", sys)  # any module without timm's parts
    monkeypatch.delitem(sys.modules, "timm.models.naflexvit", raising=False)
    assert launcher._outcome(["timm"]) == "nothing is replaced: timm ? was imported, but not its timm.models.naflexvit"


@pytest.mark.slow
def test_training_with_timms_loader_on_two_processes(children):
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m timm_naflex_fast run".split()
    code, out, err = run("--mode", "matmul", TRAINING, launch=launch)
    ranks = sorted(line.split()[1:] for line in out.splitlines() if line.startswith("rank"))
    ours = "timm_naflex_fast.patching.timm"
    assert code == 0 and [rank[:2] for rank in ranks] == [["0:", ours], ["1:", ours]], err
    assert ranks[0][2] == ranks[1][2]  # the same weights
    one = r"naflex-fast: pos_embed=matmul.*in this process ran .*pos_embed by matmul \d+ times"
    assert len(re.findall(one, err)) == 1
    assert [ran["pos_embed", "matmul"] > 0 == ran["pos_embed", "stock"] for ran in children()] == [True, True]
